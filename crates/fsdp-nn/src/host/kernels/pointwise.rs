//! Element-wise kernels.

use crate::backend::Dropout;
use crate::host::element::{Element, Float};
use crate::host::raw::vectorized;
use crate::host::workers::{TASK_ELEMS, Workers};
use crate::random;

/// `y = silu(gate) * up`.
pub(crate) fn swiglu<E: Element>(workers: &Workers, gate: &[E], up: &[E], y: &mut [E]) {
    let inputs = gate.chunks(TASK_ELEMS).zip(up.chunks(TASK_ELEMS));
    workers.each(y.chunks_mut(TASK_ELEMS).zip(inputs), |(y, (gate, up))| swiglu_range(gate, up, y));
}

vectorized! {
    fn swiglu_range<E: Element>(gate: &[E], up: &[E], y: &mut [E]) {
        for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
            let gate = gate.load();
            *y = E::store(gate * gate.logistic() * up.load());
        }
    }
}

/// Backward of [`swiglu`].
pub(crate) fn swiglu_backward<E: Element>(
    workers: &Workers,
    gate: &[E],
    up: &[E],
    dy: &[E],
    dgate: &mut [E],
    dup: &mut [E],
) {
    let inputs = gate.chunks(TASK_ELEMS).zip(up.chunks(TASK_ELEMS)).zip(dy.chunks(TASK_ELEMS));
    let tasks = dgate.chunks_mut(TASK_ELEMS).zip(dup.chunks_mut(TASK_ELEMS)).zip(inputs);
    workers.each(tasks, |((dgate, dup), ((gate, up), dy))| swiglu_backward_range(gate, up, dy, dgate, dup));
}

vectorized! {
    fn swiglu_backward_range<E: Element>(gate: &[E], up: &[E], dy: &[E], dgate: &mut [E], dup: &mut [E]) {
        let inputs = gate.iter().zip(up).zip(dy);
        for ((dgate, dup), ((gate, up), dy)) in dgate.iter_mut().zip(dup).zip(inputs) {
            let (gate, up, dy) = (gate.load(), up.load(), dy.load());
            let s = gate.logistic();
            let silu = gate * s;
            *dgate = E::store(dy * up * (s + silu * (E::Acc::ONE - s)));
            *dup = E::store(dy * silu);
        }
    }
}

/// `sqrt(2 / pi)` and the cubic coefficient of the tanh form of GELU.
const GELU_SCALE: f64 = 0.797_884_560_802_865_4;
const GELU_CUBIC: f64 = 0.044_715;

/// GELU in the tanh form, as `x * logistic(2 u)` because `(1 + tanh u) / 2 = logistic(2 u)`.
pub(crate) fn gelu<E: Element>(workers: &Workers, x: &[E], y: &mut [E]) {
    let tasks = y.chunks_mut(TASK_ELEMS).zip(x.chunks(TASK_ELEMS));
    workers.each(tasks, |(y, x)| gelu_range(x, y));
}

vectorized! {
    fn gelu_range<E: Element>(x: &[E], y: &mut [E]) {
        let (scale, cubic) = (E::Acc::of(2.0 * GELU_SCALE), E::Acc::of(GELU_CUBIC));
        for (y, x) in y.iter_mut().zip(x) {
            let x = x.load();
            let u = scale * (x + cubic * x * x * x);
            *y = E::store(x * u.logistic());
        }
    }
}

/// Backward of [`gelu`].
pub(crate) fn gelu_backward<E: Element>(workers: &Workers, x: &[E], dy: &[E], dx: &mut [E]) {
    let inputs = x.chunks(TASK_ELEMS).zip(dy.chunks(TASK_ELEMS));
    workers.each(dx.chunks_mut(TASK_ELEMS).zip(inputs), |(dx, (x, dy))| gelu_backward_range(x, dy, dx));
}

vectorized! {
    fn gelu_backward_range<E: Element>(x: &[E], dy: &[E], dx: &mut [E]) {
        let (scale, cubic) = (E::Acc::of(2.0 * GELU_SCALE), E::Acc::of(GELU_CUBIC));
        let cubic_slope = E::Acc::of(3.0 * GELU_CUBIC);
        for ((dx, x), dy) in dx.iter_mut().zip(x).zip(dy) {
            let x = x.load();
            let s = (scale * (x + cubic * x * x * x)).logistic();
            let slope = scale * (E::Acc::ONE + cubic_slope * x * x);
            *dx = E::store(dy.load() * (s + x * s * (E::Acc::ONE - s) * slope));
        }
    }
}

/// `y = a + b`.
pub(crate) fn add<E: Element>(workers: &Workers, a: &[E], b: &[E], y: &mut [E]) {
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

/// Dropout in place.
pub(crate) fn dropout<E: Element>(workers: &Workers, dropout: Dropout<'_>, x: &mut [E]) {
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

/// The factors of elements `start ..`: 0 where dropped, else `1 / (1 - p)`.
pub(crate) fn dropout_factors<A: Float>(dropout: Dropout<'_>, key: u64, start: u64, factors: &mut [A]) {
    let (threshold, kept) = (dropout.threshold(), A::of(dropout.kept()));
    let mut words = [0; 256];
    for (block, factors) in factors.chunks_mut(words.len()).enumerate() {
        let words = &mut words[..factors.len()];
        random::words(key, start + 256 * block as u64, words);
        choose(threshold, kept, words, factors);
    }
}

vectorized! {
    fn choose<A: Float>(threshold: u32, kept: A, words: &[u32], factors: &mut [A]) {
        for (factor, &word) in factors.iter_mut().zip(words) {
            *factor = if word < threshold { A::ZERO } else { kept };
        }
    }
}
