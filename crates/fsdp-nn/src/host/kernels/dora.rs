//! Kernels of DoRA: the lengths of rows of adapted weights, and products by one number per column.

use fsdp_core::Error;

use super::linear::{PARTIAL_ROWS, combine};
use crate::backend::Outcome;
use crate::host::HostMemory;
use crate::host::backend::Call;
use crate::host::element::{Element, Float};
use crate::host::floats::Target;
use crate::host::math::sum1;
use crate::host::raw::vectorized;
use crate::host::workers::{Workers, task_rows};
use crate::op::{AdaptedDims, Dora, Orientation};

impl HostMemory {
    pub(in crate::host) fn dora<E: Element>(
        &self,
        op: &Dora,
        operands: Call<'_, '_>,
    ) -> Result<Outcome, Error> {
        let workers = self.workers();
        match *op {
            Dora::Norms { dims } => {
                let ([weight, down, up], [norms], _) = operands.split();
                let (weight, down, up) =
                    (self.elements::<E>(weight)?, self.elements(down)?, self.elements(up)?);
                row_norms(workers, dims, weight, [down, up], self.elements_mut(norms.slice)?);
            }
            Dora::Rescale { width, .. } => {
                let bias = operands.reads.get(3).map(|&bias| self.elements::<E>(bias)).transpose()?;
                let ([x, magnitude, norms], [y], _) = operands.split();
                let factors = factors::<E>(self.elements(magnitude)?, self.elements(norms)?);
                let (x, y) = (self.elements::<E>(x)?, self.elements_mut(y.slice)?);
                let len = task_rows(width) * width;
                workers
                    .each(y.chunks_mut(len).zip(x.chunks(len)), |(y, x)| rescale_rows(x, &factors, bias, y));
            }
            Dora::RescaleBackward { width, .. } => {
                let ([x, magnitude, norms], [dy, dmagnitude], _) = operands.split();
                let (x, norms) = (self.elements::<E>(x)?, self.elements(norms)?);
                let factors = factors::<E>(self.elements(magnitude)?, norms);
                let dy = self.elements_mut::<E>(dy.slice)?;
                magnitude_gradient(workers, x, dy, norms, self.target(dmagnitude)?);
                workers.each(dy.chunks_mut(task_rows(width) * width), |dy| multiply_rows(&factors, dy));
            }
        }
        Ok(Outcome::Done)
    }
}

/// The factor of each column.
fn factors<E: Element>(magnitude: &[E], norms: &[E]) -> Vec<E::Acc> {
    magnitude.iter().zip(norms).map(|(magnitude, norm)| magnitude.load() / norm.load()).collect()
}

/// The length of every row of the adapted weight.
fn row_norms<E: Element>(
    workers: &Workers,
    dims: AdaptedDims,
    weight: &[E],
    [down, up]: [&[E]; 2],
    norms: &mut [E],
) {
    let rows = task_rows(dims.inputs);
    let tasks = norms.chunks_mut(rows).zip(up.chunks(rows * dims.rank)).enumerate();
    workers.each(tasks, |(task, (norms, up))| {
        let mut sums = workers.scratch::<E::Acc>(norms.len() * dims.inputs);
        load_rows(dims, task * rows, weight, &mut sums);
        add_low_rank(dims, down, up, &mut sums);
        for (norm, sums) in norms.iter_mut().zip(sums.chunks_exact(dims.inputs)) {
            *norm = E::store(sum1(sums, |sum| sum * sum).sqrt());
        }
    });
}

/// Loads rows of a weight, of outputs that begin with `first`.
fn load_rows<E: Element>(dims: AdaptedDims, first: usize, weight: &[E], rows: &mut [E::Acc]) {
    let AdaptedDims { inputs, outputs, .. } = dims;
    match dims.orientation {
        Orientation::OutIn => {
            let weight = &weight[first * inputs..][..rows.len()];
            rows.iter_mut().zip(weight).for_each(|(to, from)| *to = from.load());
        }
        Orientation::InOut => {
            let count = rows.len() / inputs;
            for (input, weight) in weight.chunks_exact(outputs).enumerate() {
                let to = rows.iter_mut().skip(input).step_by(inputs);
                to.zip(&weight[first..first + count]).for_each(|(to, from)| *to = from.load());
            }
        }
    }
}

vectorized! {
    /// Adds `scale B A` to rows, for which `up` has the rows of `B`.
    fn add_low_rank<E: Element>(dims: AdaptedDims, down: &[E], up: &[E], rows: &mut [E::Acc]) {
        let scale = E::Acc::of(dims.scale);
        for (up, sums) in up.chunks_exact(dims.rank).zip(rows.chunks_exact_mut(dims.inputs)) {
            for (b, a) in up.iter().zip(down.chunks_exact(dims.inputs)) {
                let factor = scale * b.load();
                for (sum, a) in sums.iter_mut().zip(a) {
                    *sum += factor * a.load();
                }
            }
        }
    }
}

vectorized! {
    fn rescale_rows<E: Element>(x: &[E], factors: &[E::Acc], bias: Option<&[E]>, y: &mut [E]) {
        let rows = x.chunks_exact(factors.len()).zip(y.chunks_exact_mut(factors.len()));
        for (x, y) in rows {
            let elements = y.iter_mut().zip(x).zip(factors);
            match bias {
                Some(bias) => elements.zip(bias).for_each(|(((y, x), factor), bias)| {
                    *y = E::store(x.load() * *factor + bias.load());
                }),
                None => elements.for_each(|((y, x), factor)| *y = E::store(x.load() * *factor)),
            }
        }
    }
}

vectorized! {
    fn multiply_rows<E: Element>(factors: &[E::Acc], elements: &mut [E]) {
        for row in elements.chunks_exact_mut(factors.len()) {
            for (element, factor) in row.iter_mut().zip(factors) {
                *element = E::store(element.load() * *factor);
            }
        }
    }
}

/// Column sums of `dy * x`, divided by the norms.
fn magnitude_gradient<E: Element>(workers: &Workers, x: &[E], dy: &[E], norms: &[E], mut into: Target<'_>) {
    let len = PARTIAL_ROWS * norms.len();
    let partials = workers.map(x.chunks(len).zip(dy.chunks(len)), |(x, dy)| {
        let mut sums = vec![E::Acc::ZERO; norms.len()];
        add_products(x, dy, &mut sums);
        sums
    });
    let mut sums = combine(partials);
    sums.iter_mut().zip(norms).for_each(|(sum, norm)| *sum = *sum / norm.load());
    into.put(0, &sums);
}

vectorized! {
    fn add_products<E: Element>(x: &[E], dy: &[E], sums: &mut [E::Acc]) {
        for (x, dy) in x.chunks_exact(sums.len()).zip(dy.chunks_exact(sums.len())) {
            for ((sum, x), dy) in sums.iter_mut().zip(x).zip(dy) {
                *sum += x.load() * dy.load();
            }
        }
    }
}
