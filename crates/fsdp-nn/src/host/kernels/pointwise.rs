//! Kernels of element-wise sums, dropout, regrouping and scaling.

use fsdp_core::Error;

use crate::backend::Outcome;
use crate::host::HostMemory;
use crate::host::backend::Call;
use crate::host::element::{Element, Float};
use crate::host::raw::vectorized;
use crate::host::workers::{TASK_ELEMS, Workers, task_rows};
use crate::op::{Dropout, Pointwise};
use crate::random;

impl HostMemory {
    pub(in crate::host) fn pointwise<E: Element>(
        &self,
        op: &Pointwise,
        operands: Call<'_, '_>,
    ) -> Result<Outcome, Error> {
        let (workers, keys) = (self.workers(), operands.batch.keys);
        match *op {
            Pointwise::Add { .. } => {
                let ([a, b], [y], _) = operands.split();
                let (a, b) = (self.elements::<E>(a)?, self.elements(b)?);
                add(workers, a, b, self.elements_mut(y.slice)?);
            }
            Pointwise::CopyColumns { columns, from, to, .. } => {
                let ([x], [y], _) = operands.split();
                let add = y.accumulate;
                let (x, y) = (self.elements::<E>(x)?, self.elements_mut(y.slice)?);
                let rows = task_rows(columns);
                let tasks = y.chunks_mut(rows * to).zip(x.chunks(rows * from));
                workers.each(tasks, |(y, x)| {
                    for (y, x) in y.chunks_mut(to).zip(x.chunks(from)) {
                        match add {
                            true => accumulate(&x[..columns], &mut y[..columns]),
                            false => y[..columns].copy_from_slice(&x[..columns]),
                        }
                    }
                });
            }
            Pointwise::Regroup { groups, parts, width, .. } => {
                let ([x], [y], _) = operands.split();
                let (x, y) = (self.elements::<E>(x)?, self.elements_mut(y.slice)?);
                regroup(workers, [groups, parts, width], x, y);
            }
            Pointwise::Repeat { width, .. } => {
                let ([x], [y], _) = operands.split();
                let (x, y) = (self.elements::<E>(x)?, self.elements_mut(y.slice)?);
                let copy = |y: &mut [E]| y.chunks_exact_mut(width).for_each(|y| y.copy_from_slice(x));
                workers.each(y.chunks_mut(task_rows(width) * width), copy);
            }
            Pointwise::Scale { factor, .. } => {
                let ([], [x], _) = operands.split();
                let x = self.elements_mut::<E>(x.slice)?;
                workers.each(x.chunks_mut(TASK_ELEMS), |x| scale(E::Acc::of(factor), x));
            }
            Pointwise::Dropout { p, .. } => {
                let ([], [x], _) = operands.split();
                let x = self.elements_mut::<E>(x.slice)?;
                dropout(workers, Dropout { p, keys }, x);
            }
            Pointwise::Accumulate { .. } | Pointwise::Copy { .. } | Pointwise::Convert { .. } => {
                return Ok(Outcome::Unsupported);
            }
        }
        Ok(Outcome::Done)
    }
}

vectorized! {
    /// `y += x`.
    pub(super) fn accumulate<E: Element>(x: &[E], y: &mut [E]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = E::store(y.load() + x.load());
        }
    }
}

/// Sets block `(part, group)` of each row of `y` to block `(group, part)` of that row of `x`.
fn regroup<E: Element>(workers: &Workers, [groups, parts, width]: [usize; 3], x: &[E], y: &mut [E]) {
    let row = groups * parts * width;
    let len = task_rows(row) * row;
    workers.each(y.chunks_mut(len).zip(x.chunks(len)), |(y, x)| {
        for (y, x) in y.chunks_exact_mut(row).zip(x.chunks_exact(row)) {
            for (index, block) in y.chunks_exact_mut(width).enumerate() {
                let (part, group) = (index / groups, index % groups);
                block.copy_from_slice(&x[(group * parts + part) * width..][..width]);
            }
        }
    });
}

/// `y = a + b`.
fn add<E: Element>(workers: &Workers, a: &[E], b: &[E], y: &mut [E]) {
    let inputs = a.chunks(TASK_ELEMS).zip(b.chunks(TASK_ELEMS));
    workers.each(y.chunks_mut(TASK_ELEMS).zip(inputs), |(y, (a, b))| add_range(a, b, y));
}

vectorized! {
    fn add_range<E: Element>(a: &[E], b: &[E], y: &mut [E]) {
        for ((y, a), b) in y.iter_mut().zip(a).zip(b) {
            *y = E::store(a.load() + b.load());
        }
    }
}

vectorized! {
    fn scale<E: Element>(factor: E::Acc, x: &mut [E]) {
        for x in x.iter_mut() {
            *x = E::store(x.load() * factor);
        }
    }
}

/// Dropout in place.
fn dropout<E: Element>(workers: &Workers, dropout: Dropout<'_>, x: &mut [E]) {
    let sample_len = x.len() / dropout.keys.len();
    let samples = x.chunks_mut(sample_len.max(1)).zip(dropout.keys);
    let tasks = samples.flat_map(|(sample, &key)| {
        sample.chunks_mut(TASK_ELEMS).enumerate().map(move |(task, range)| (key, task * TASK_ELEMS, range))
    });
    workers.each(tasks, |(key, start, range)| {
        let mut factors = workers.scratch::<E::Acc>(range.len());
        dropout_factors(dropout, key, start as u64, &mut factors);
        scale_range(&factors, range);
    });
}

vectorized! {
    fn scale_range<E: Element>(factors: &[E::Acc], x: &mut [E]) {
        for (x, &factor) in x.iter_mut().zip(factors) {
            *x = E::store(x.load() * factor);
        }
    }
}

/// Computes the factors of elements `start ..`: 0 if dropped, otherwise `1 / (1 - p)`.
pub(crate) fn dropout_factors<A: Float>(dropout: Dropout<'_>, key: u64, start: u64, factors: &mut [A]) {
    let (threshold, kept_factor) = (dropout.threshold(), A::of(dropout.kept()));
    let mut words = [0; 256];
    for (block, factors) in factors.chunks_mut(words.len()).enumerate() {
        let words = &mut words[..factors.len()];
        random::words(key, start + 256 * block as u64, words);
        choose(threshold, kept_factor, words, factors);
    }
}

vectorized! {
    fn choose<A: Float>(threshold: u32, kept_factor: A, words: &[u32], factors: &mut [A]) {
        for (factor, &word) in factors.iter_mut().zip(words) {
            *factor = if word < threshold { A::ZERO } else { kept_factor };
        }
    }
}
