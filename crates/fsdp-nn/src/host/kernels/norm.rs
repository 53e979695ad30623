//! Norms over rows: root mean square, and mean and variance.
//!
//! Each row takes one pass for statistics and one for results; gradients of weights are partial column sums over
//! fixed blocks of rows, added in order.

use fsdp_core::Error;

use super::linear::{PARTIAL_ROWS, combine};
use crate::backend::Outcome;
use crate::host::HostMemory;
use crate::host::backend::Call;
use crate::host::element::{Element, Float};
use crate::host::floats::Target;
use crate::host::math::{sum1, sum2, sum3};
use crate::host::raw::vectorized;
use crate::host::workers::{Workers, task_rows};
use crate::op::Norm;

impl HostMemory {
    pub(in crate::host) fn norm<E: Element>(
        &self,
        op: &Norm,
        operands: Call<'_, '_>,
    ) -> Result<Outcome, Error> {
        let workers = self.workers();
        match *op {
            Norm::Rms { width, eps, offset, .. } => {
                let ([x, weight], [y, rstd], _) = operands.split();
                let (x, weight) = (self.elements::<E>(x)?, self.elements(weight)?);
                let (y, rstd) = (self.elements_mut(y.slice)?, self.elements_mut(rstd.slice)?);
                rms(workers, width, [eps, offset], x, weight, y, rstd);
            }
            Norm::RmsBackward { width, offset, .. } => {
                let ([x, weight, rstd, dy], [dx], mut more) = operands.split();
                let (x, weight) = (self.elements::<E>(x)?, self.elements(weight)?);
                let (rstd, dy, accumulate) = (self.elements(rstd)?, self.elements(dy)?, dx.accumulate);
                let dx = self.elements_mut(dx.slice)?;
                rms_backward_input(workers, (width, offset), x, weight, rstd, dy, dx, accumulate);
                if let Some(dweight) = more.next() {
                    rms_backward_weight(workers, width, x, rstd, dy, self.target(dweight)?);
                }
            }
            Norm::Layer { width, eps, .. } => {
                let bias = operands.reads.get(2).map(|&bias| self.elements::<E>(bias)).transpose()?;
                let ([x, weight], [y, stats], _) = operands.split();
                let (x, weight) = (self.elements::<E>(x)?, self.elements(weight)?);
                let (y, stats) = (self.elements_mut(y.slice)?, self.elements_mut(stats.slice)?);
                layer(workers, width, eps, x, weight, bias, y, stats);
            }
            Norm::LayerBackwardInput { width, .. } => {
                let ([x, weight, stats, dy], [dx], _) = operands.split();
                let (x, weight) = (self.elements::<E>(x)?, self.elements(weight)?);
                let (stats, dy, accumulate) = (self.elements(stats)?, self.elements(dy)?, dx.accumulate);
                let dx = self.elements_mut(dx.slice)?;
                layer_backward_input(workers, width, x, weight, stats, dy, dx, accumulate);
            }
            Norm::LayerBackwardWeight { width, .. } => {
                let ([x, stats, dy], [dweight], _) = operands.split();
                let (x, stats, dy) = (self.elements::<E>(x)?, self.elements(stats)?, self.elements(dy)?);
                layer_backward_weight(workers, width, x, stats, dy, self.target(dweight)?);
            }
        }
        Ok(Outcome::Done)
    }
}

/// `y = x * rstd * (weight + offset)`, and `rstd` of each row.
fn rms<E: Element>(
    workers: &Workers,
    width: usize,
    constants: [f64; 2],
    x: &[E],
    weight: &[E],
    y: &mut [E],
    rstd: &mut [E::Acc],
) {
    let rows = task_rows(width);
    let tasks = y.chunks_mut(rows * width).zip(rstd.chunks_mut(rows)).zip(x.chunks(rows * width));
    workers.each(tasks, |((y, rstd), x)| rms_rows(width, constants, x, weight, y, rstd));
}

vectorized! {
    fn rms_rows<E: Element>(
        width: usize, constants: [f64; 2], x: &[E], weight: &[E], y: &mut [E], rstd: &mut [E::Acc],
    ) {
        let [eps, offset] = constants;
        let (count, offset) = (E::Acc::of(width as f64), E::Acc::of(offset));
        for ((x, y), rstd) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)).zip(rstd) {
            let squares = sum1(x, |x| x.load() * x.load());
            let scale = E::Acc::ONE / (squares / count + E::Acc::of(eps)).sqrt();
            *rstd = scale;
            for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
                *y = E::store(x.load() * scale * (w.load() + offset));
            }
        }
    }
}

/// Computes the gradient of the input of [`rms`].
fn rms_backward_input<E: Element>(
    workers: &Workers,
    (width, offset): (usize, f64),
    x: &[E],
    weight: &[E],
    rstd: &[E::Acc],
    dy: &[E],
    dx: &mut [E],
    accumulate: bool,
) {
    let rows = task_rows(width);
    let inputs = x.chunks(rows * width).zip(dy.chunks(rows * width)).zip(rstd.chunks(rows));
    workers.each(dx.chunks_mut(rows * width).zip(inputs), |(dx, ((x, dy), rstd))| {
        rms_backward_rows((width, offset), x, weight, rstd, dy, dx, accumulate);
    });
}

vectorized! {
    fn rms_backward_rows<E: Element>(
        sizes: (usize, f64), x: &[E], weight: &[E], rstd: &[E::Acc], dy: &[E], dx: &mut [E], accumulate: bool,
    ) {
        let (width, offset) = sizes;
        let (count, offset) = (E::Acc::of(width as f64), E::Acc::of(offset));
        let rows = x.chunks_exact(width).zip(dy.chunks_exact(width)).zip(dx.chunks_exact_mut(width));
        for (((x, dy), dx), &rstd) in rows.zip(rstd) {
            let weight = &weight[..width];
            let projection = sum3(dy, weight, x, |dy, w, x| dy.load() * (w.load() + offset) * x.load());
            let mean = projection * rstd * rstd / count;
            for (((dx, x), dy), w) in dx.iter_mut().zip(x).zip(dy).zip(weight) {
                let before = if accumulate { dx.load() } else { E::Acc::ZERO };
                *dx = E::store(before + rstd * (dy.load() * (w.load() + offset) - x.load() * mean));
            }
        }
    }
}

/// Computes the gradient of the weight of [`rms`]: column sums of `dy * x * rstd`.
fn rms_backward_weight<E: Element>(
    workers: &Workers,
    width: usize,
    x: &[E],
    rstd: &[E::Acc],
    dy: &[E],
    mut dweight: Target<'_>,
) {
    let len = PARTIAL_ROWS * width;
    let tasks = x.chunks(len).zip(dy.chunks(len)).zip(rstd.chunks(PARTIAL_ROWS));
    let partials = workers.map(tasks, |((x, dy), rstd)| {
        let mut sums = vec![E::Acc::ZERO; width];
        rms_weight_rows(width, x, rstd, dy, &mut sums);
        sums
    });
    dweight.put(0, &combine(partials));
}

vectorized! {
    fn rms_weight_rows<E: Element>(width: usize, x: &[E], rstd: &[E::Acc], dy: &[E], sums: &mut [E::Acc]) {
        for ((x, dy), &rstd) in x.chunks_exact(width).zip(dy.chunks_exact(width)).zip(rstd) {
            for ((sum, x), dy) in sums.iter_mut().zip(x).zip(dy) {
                *sum += dy.load() * (x.load() * rstd);
            }
        }
    }
}

/// `y = (x - mean) * rstd * weight`, plus the bias if there is one, and mean and rstd of each row.
fn layer<E: Element>(
    workers: &Workers,
    width: usize,
    eps: f64,
    x: &[E],
    weight: &[E],
    bias: Option<&[E]>,
    y: &mut [E],
    stats: &mut [E::Acc],
) {
    let rows = task_rows(width);
    let tasks = y.chunks_mut(rows * width).zip(stats.chunks_mut(2 * rows)).zip(x.chunks(rows * width));
    workers.each(tasks, |((y, stats), x)| layer_rows(width, eps, x, weight, bias, y, stats));
}

vectorized! {
    fn layer_rows<E: Element>(
        width: usize, eps: f64, x: &[E], weight: &[E], bias: Option<&[E]>, y: &mut [E],
        stats: &mut [E::Acc],
    ) {
        let count = E::Acc::of(width as f64);
        for ((x, y), stats) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)).zip(stats.chunks_exact_mut(2)) {
            let mean = sum1(x, |x| x.load()) / count;
            let squares = sum1(x, |x| (x.load() - mean) * (x.load() - mean));
            let rstd = E::Acc::ONE / (squares / count + E::Acc::of(eps)).sqrt();
            stats[0] = mean;
            stats[1] = rstd;
            let rows = y.iter_mut().zip(x).zip(weight);
            match bias {
                Some(bias) => rows.zip(bias).for_each(|(((y, x), w), b)| {
                    *y = E::store((x.load() - mean) * rstd * w.load() + b.load());
                }),
                None => rows.for_each(|((y, x), w)| *y = E::store((x.load() - mean) * rstd * w.load())),
            }
        }
    }
}

/// Computes the gradient of the input of [`layer`].
fn layer_backward_input<E: Element>(
    workers: &Workers,
    width: usize,
    x: &[E],
    weight: &[E],
    stats: &[E::Acc],
    dy: &[E],
    dx: &mut [E],
    accumulate: bool,
) {
    let rows = task_rows(width);
    let inputs = x.chunks(rows * width).zip(dy.chunks(rows * width)).zip(stats.chunks(2 * rows));
    workers.each(dx.chunks_mut(rows * width).zip(inputs), |(dx, ((x, dy), stats))| {
        layer_backward_rows(width, x, weight, stats, dy, dx, accumulate);
    });
}

vectorized! {
    fn layer_backward_rows<E: Element>(
        width: usize, x: &[E], weight: &[E], stats: &[E::Acc], dy: &[E], dx: &mut [E], accumulate: bool,
    ) {
        let count = E::Acc::of(width as f64);
        let rows = x.chunks_exact(width).zip(dy.chunks_exact(width)).zip(dx.chunks_exact_mut(width));
        for (((x, dy), dx), stats) in rows.zip(stats.chunks_exact(2)) {
            let (weight, mean, rstd) = (&weight[..width], stats[0], stats[1]);
            let sum = sum2(dy, weight, |dy, w| dy.load() * w.load());
            let projection = sum3(dy, weight, x, |dy, w, x| dy.load() * w.load() * ((x.load() - mean) * rstd));
            let (offset, slope) = (sum / count, projection / count);
            for (((dx, x), dy), w) in dx.iter_mut().zip(x).zip(dy).zip(weight) {
                let before = if accumulate { dx.load() } else { E::Acc::ZERO };
                let normal = (x.load() - mean) * rstd;
                *dx = E::store(before + rstd * (dy.load() * w.load() - offset - normal * slope));
            }
        }
    }
}

/// Computes the gradient of the weight of [`layer`]: column sums of `dy * (x - mean) * rstd`.
fn layer_backward_weight<E: Element>(
    workers: &Workers,
    width: usize,
    x: &[E],
    stats: &[E::Acc],
    dy: &[E],
    mut dweight: Target<'_>,
) {
    let len = PARTIAL_ROWS * width;
    let tasks = x.chunks(len).zip(dy.chunks(len)).zip(stats.chunks(2 * PARTIAL_ROWS));
    let partials = workers.map(tasks, |((x, dy), stats)| {
        let mut sums = vec![E::Acc::ZERO; width];
        layer_weight_rows(width, x, stats, dy, &mut sums);
        sums
    });
    dweight.put(0, &combine(partials));
}

vectorized! {
    fn layer_weight_rows<E: Element>(width: usize, x: &[E], stats: &[E::Acc], dy: &[E], sums: &mut [E::Acc]) {
        let rows = x.chunks_exact(width).zip(dy.chunks_exact(width)).zip(stats.chunks_exact(2));
        for ((x, dy), stats) in rows {
            for ((sum, x), dy) in sums.iter_mut().zip(x).zip(dy) {
                *sum += dy.load() * ((x.load() - stats[0]) * stats[1]);
            }
        }
    }
}
