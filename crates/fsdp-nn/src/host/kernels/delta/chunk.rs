//! What the gated delta rule computes of one chunk of tokens.
//!
//! With the decays `G` summed from the first token of the chunk, `D = exp(G_i - G_j)` on and below the diagonal, and `E =
//! exp(G)`, the corrections `C` of all tokens solve `(I + A) C = R`, where `A = beta (k k^T) D` below the diagonal and
//! `R = beta (v - E k S)`. Then `y = E q S + (q k^T D) C`, and the next state is `exp(G_last) S + (exp(G_last - G) k)^T C`.
//! Since `D_ij D_jk = D_ik`, the inverse of `I + A` is that of `I + beta (k k^T)`, times `D` element by element.

use ndarray::ArrayView2;

use crate::host::element::{Element, Float};
use crate::host::kernels::attention::{matrix, matrix_mut};
use crate::host::math::sum1;
use crate::host::pool::Scratch;
use crate::host::raw::{product, vectorized};
use crate::host::workers::Workers;
use crate::op::{CHUNK, NORM_EPS};

/// The queries and keys of a chunk, divided by their norms, and their products.
pub(super) struct Keys<A> {
    pub(super) len: usize,
    pub(super) dim: usize,
    pub(super) q: Scratch<A>,
    pub(super) k: Scratch<A>,
    /// One over the norm of each query, then of each key.
    pub(super) inverse_norms: [[A; CHUNK]; 2],
    pub(super) qk: Scratch<A>,
    pub(super) kk: Scratch<A>,
}

impl<A: Float> Keys<A> {
    pub(super) fn new(workers: &Workers, dim: usize) -> Self {
        let [q, k] = [0; 2].map(|_| workers.scratch(CHUNK * dim));
        let [qk, kk] = [0; 2].map(|_| workers.scratch(CHUNK * CHUNK));
        Self { len: 0, dim, q, k, inverse_norms: [[A::ZERO; CHUNK]; 2], qk, kk }
    }

    /// Loads a chunk of `len` rows, `width` elements apart, whose queries and keys begin at these columns.
    pub(super) fn load<E: Element<Acc = A>>(
        &mut self,
        rows: &[E],
        width: usize,
        columns: [usize; 2],
        len: usize,
    ) {
        let (dim, scale) = (self.dim, A::of(1.0 / (self.dim as f64).sqrt()));
        self.len = len;
        let [of_q, of_k] = &mut self.inverse_norms;
        let parts = [(&mut self.q, of_q, columns[0], scale), (&mut self.k, of_k, columns[1], A::ONE)];
        for (into, inverse_norms, column, scale) in parts {
            for (row, into) in into.chunks_exact_mut(dim).take(len).enumerate() {
                inverse_norms[row] = divide_by_norm(&rows[row * width + column..][..dim], scale, into);
            }
        }
        let (q, k) = (matrix(&self.q, len, dim), matrix(&self.k, len, dim));
        product(matrix_mut(&mut self.qk, len, len), false, q, k.t(), 1);
        product(matrix_mut(&mut self.kk, len, len), false, k, k.t(), 1);
    }

    pub(super) fn queries(&self) -> ArrayView2<'_, A> {
        matrix(&self.q, self.len, self.dim)
    }

    pub(super) fn keys(&self) -> ArrayView2<'_, A> {
        matrix(&self.k, self.len, self.dim)
    }
}

vectorized! {
    /// Writes a head divided by its norm, times `scale`; returns one over the norm.
    pub(super) fn divide_by_norm<E: Element>(head: &[E], scale: E::Acc, into: &mut [E::Acc]) -> E::Acc {
        let squares = sum1(head, |x| x.load() * x.load());
        let inverse = E::Acc::ONE / (squares + E::Acc::of(NORM_EPS)).sqrt();
        for (to, x) in into.iter_mut().zip(head) {
            *to = x.load() * inverse * scale;
        }
        inverse
    }
}

/// The gates of a token for one value head.
#[derive(Clone, Copy)]
pub(super) struct Gate<A> {
    /// The fraction of the difference that is corrected.
    pub(super) beta: A,
    /// The logarithm of the decay.
    pub(super) g: A,
    /// The derivative of `g` by `a`.
    pub(super) slope: A,
}

impl<A: Float> Gate<A> {
    /// From the logit of `beta`, `a` with its bias, and the rate of decay.
    pub(super) fn new(logit: A, a: A, rate: f64) -> Self {
        let a = a.as_f64();
        // As in PyTorch, the softplus of a large number is the number.
        let softplus = if a > 20.0 { a } else { a.exp().ln_1p() };
        let slope = -rate / (1.0 + (-a).exp());
        Self { beta: logit.logistic(), g: A::of(-rate * softplus), slope: A::of(slope) }
    }
}

/// The decays of a chunk for one value head, and its matrices.
pub(super) struct Decays<A> {
    pub(super) len: usize,
    pub(super) beta: [A; CHUNK],
    /// Decay from the first token to each, including both.
    pub(super) from_start: [A; CHUNK],
    /// Decay from each token, without its own, to the last.
    pub(super) to_end: [A; CHUNK],
    /// Decay over all tokens.
    pub(super) whole: A,
    /// `D`, with zeros above the diagonal.
    pub(super) between: Scratch<A>,
    /// `(q k^T) D`.
    pub(super) weights: Scratch<A>,
    /// The inverse of `I + A`.
    pub(super) inverse: Scratch<A>,
    system: Scratch<A>,
}

impl<A: Float> Decays<A> {
    pub(super) fn new(workers: &Workers) -> Self {
        let [between, weights, inverse, system] = [0; 4].map(|_| workers.scratch(CHUNK * CHUNK));
        let zeros = [A::ZERO; CHUNK];
        Self {
            len: 0,
            beta: zeros,
            from_start: zeros,
            to_end: zeros,
            whole: A::ONE,
            between,
            weights,
            inverse,
            system,
        }
    }

    /// Computes everything from the gates of the chunk's tokens.
    pub(super) fn load(&mut self, keys: &Keys<A>, gates: &[Gate<A>]) {
        let len = gates.len();
        let mut sums = [A::ZERO; CHUNK];
        let mut sum = A::ZERO;
        for (i, gate) in gates.iter().enumerate() {
            sum += gate.g;
            (sums[i], self.beta[i]) = (sum, gate.beta);
        }
        (self.len, self.whole) = (len, decay(sum));
        for (i, &before) in sums[..len].iter().enumerate() {
            (self.from_start[i], self.to_end[i]) = (decay(before), decay(sum - before));
        }
        for i in 0..len {
            let row = i * len..(i + 1) * len;
            decay_row(&sums[..len], i, &mut self.between[row.clone()]);
            self.weights[row.clone()].copy_from_slice(&keys.qk[row.clone()]);
            scaled(&keys.kk[row.clone()], self.beta[i], &mut self.system[row]);
        }
        invert(len, &self.system, &mut self.inverse);
        multiply(&self.between[..len * len], &mut self.weights);
        multiply(&self.between[..len * len], &mut self.inverse);
    }

    pub(super) fn weights(&self) -> ArrayView2<'_, A> {
        matrix(&self.weights, self.len, self.len)
    }

    pub(super) fn inverse(&self) -> ArrayView2<'_, A> {
        matrix(&self.inverse, self.len, self.len)
    }
}

/// `exp(g)`, but zero below 2^-64, which changes no sum that any other token takes part in: smaller decays times keys and
/// states would be subnormal, and CPUs multiply such numbers a hundred times slower.
#[inline(always)]
fn decay<A: Float>(g: A) -> A {
    let least = A::of(-64.0 * std::f64::consts::LN_2);
    if g < least { A::ZERO } else { g.exp() }
}

vectorized! {
    /// Writes the decays from earlier tokens to the one at `index`, and zeros for later ones.
    fn decay_row<A: Float>(sums: &[A], index: usize, row: &mut [A]) {
        let (before, after) = row.split_at_mut(index + 1);
        let sum = sums[index];
        for (to, &other) in before.iter_mut().zip(sums) {
            *to = decay(sum - other);
        }
        after.fill(A::ZERO);
    }
}

vectorized! {
    fn multiply<A: Float>(values: &[A], into: &mut [A]) {
        for (to, &value) in into.iter_mut().zip(values) {
            *to *= value;
        }
    }
}

vectorized! {
    /// Inverts `I + system`, of which only what is below the diagonal counts, by substitution row by row.
    fn invert<A: Float>(len: usize, system: &[A], inverse: &mut [A]) {
        for i in 0..len {
            let (above, row) = inverse[..(i + 1) * len].split_at_mut(i * len);
            row.fill(A::ZERO);
            row[i] = A::ONE;
            for (j, above) in above.chunks_exact(len).enumerate() {
                let factor = system[i * len + j];
                for (to, &from) in row[..=j].iter_mut().zip(above) {
                    *to = *to - factor * from;
                }
            }
        }
    }
}

/// What a chunk computes of a state and its values.
pub(super) struct Corrections<A> {
    /// `k S`.
    pub(super) read: Scratch<A>,
    /// `R`.
    pub(super) rest: Scratch<A>,
    /// `C`.
    pub(super) new: Scratch<A>,
}

impl<A: Float> Corrections<A> {
    pub(super) fn new(workers: &Workers, value_dim: usize) -> Self {
        let [read, rest, new] = [0; 3].map(|_| workers.scratch(CHUNK * value_dim));
        Self { read, rest, new }
    }

    /// Computes the corrections of rows of values, which are `stride` elements apart.
    pub(super) fn load<E: Element<Acc = A>>(
        &mut self,
        (keys, decays): (&Keys<A>, &Decays<A>),
        (values, stride): (&[E], usize),
        (state, dim): (&[A], usize),
    ) {
        let len = keys.len;
        product(matrix_mut(&mut self.read, len, dim), false, keys.keys(), matrix(state, keys.dim, dim), 1);
        let rows = self.rest.chunks_exact_mut(dim).zip(self.read.chunks_exact(dim)).take(len);
        for (i, (rest, read)) in rows.enumerate() {
            difference(&values[i * stride..][..dim], read, [decays.beta[i], decays.from_start[i]], rest);
        }
        let rest = matrix(&self.rest, len, dim);
        product(matrix_mut(&mut self.new, len, dim), false, decays.inverse(), rest, 1);
    }

    /// Replaces the state by the one after the chunk; what the chunk has read is lost.
    pub(super) fn advance(&mut self, keys: &Keys<A>, decays: &Decays<A>, (state, dim): (&mut [A], usize)) {
        let len = keys.len;
        scale(decays.whole, state);
        for i in 0..len {
            let row = i * dim..(i + 1) * dim;
            scaled(&self.new[row.clone()], decays.to_end[i], &mut self.read[row]);
        }
        let late = matrix(&self.read, len, dim);
        product(matrix_mut(state, keys.dim, dim), true, keys.keys().reversed_axes(), late, 1);
    }
}

vectorized! {
    /// `beta (value - decay read)`.
    fn difference<E: Element>(value: &[E], read: &[E::Acc], factors: [E::Acc; 2], into: &mut [E::Acc]) {
        let [beta, decay] = factors;
        for ((to, value), &read) in into.iter_mut().zip(value).zip(read) {
            *to = beta * (value.load() - decay * read);
        }
    }
}

vectorized! {
    pub(super) fn scale<A: Float>(factor: A, values: &mut [A]) {
        for value in values {
            *value *= factor;
        }
    }
}

vectorized! {
    pub(super) fn scaled<A: Float>(values: &[A], factor: A, into: &mut [A]) {
        for (to, &value) in into.iter_mut().zip(values) {
            *to = value * factor;
        }
    }
}

vectorized! {
    /// `into += factor values`.
    pub(super) fn add_scaled<A: Float>(values: &[A], factor: A, into: &mut [A]) {
        for (to, &value) in into.iter_mut().zip(values) {
            *to += value * factor;
        }
    }
}
