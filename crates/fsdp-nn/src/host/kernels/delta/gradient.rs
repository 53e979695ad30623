//! Backward of the gated delta rule: the states before the chunks of a document are computed again, then the gradients of its
//! chunks from the last to the first.

use std::ops::Range;

use ndarray::ArrayViewMut2;

use super::chunk::{Corrections, Decays, Gate, Keys, add_scaled, scale, scaled};
use super::scan::{Inputs, by_document, chunks, fill_states};
use crate::host::element::{Element, Float};
use crate::host::floats::cast;
use crate::host::kernels::attention::{columns, matrix, matrix_mut};
use crate::host::kernels::linear::combine;
use crate::host::math::sum2;
use crate::host::pool::Scratch;
use crate::host::raw::{product, vectorized};
use crate::host::workers::Workers;
use crate::op::{CHUNK, DeltaDims};

/// The inputs of forward, and the gradient of the output.
#[derive(Clone, Copy)]
pub(super) struct Recorded<'a, E> {
    pub(super) inputs: Inputs<'a, E>,
    pub(super) dy: &'a [E],
}

/// The columns of a task: of queries, keys, values, the logits of `beta`, and `a`.
type Gradients<'a, E> = [ArrayViewMut2<'a, E>; 5];

/// Computes the gradients of rows and gates; returns that of `a_log`, summed over the documents in order.
pub(super) fn backward<E: Element>(
    workers: &Workers,
    recorded: Recorded<'_, E>,
    spans: &[Range<usize>],
    mut states: &mut [E::Acc],
    [dqkv, dgates]: [&mut [E]; 2],
) -> Vec<E::Acc> {
    let dims = recorded.inputs.dims;
    let DeltaDims { key_heads, value_heads, key_dim, value_dim, .. } = dims;
    let all = by_document(dqkv, dims.width(), spans, dims.width());
    let gates = by_document(dgates, 2 * value_heads, spans, 2 * value_heads);
    let tasks = spans.iter().zip(all.zip(gates)).flat_map(|(span, (all, gates))| {
        let (dq, rest) = all.split_at(ndarray::Axis(1), key_heads * key_dim);
        let (dk, dv) = rest.split_at(ndarray::Axis(1), key_heads * key_dim);
        let (dlogits, da) = gates.split_at(ndarray::Axis(1), value_heads);
        let parts = [(dq, key_dim), (dk, key_dim), (dv, dims.group() * value_dim)];
        let parts = parts.into_iter().chain([(dlogits, dims.group()), (da, dims.group())]);
        let mut parts = parts.map(|(view, block)| columns(view, block).into_iter());
        let mut parts: [_; 5] = std::array::from_fn(|_| parts.next().expect("there are five"));
        let states_len = (chunks(span).count() - 1) * dims.group() * key_dim * value_dim;
        let mut taken = states
            .split_off_mut(..key_heads * states_len)
            .expect("documents have no more chunks than samples");
        (0..key_heads).map(move |head| {
            let views = parts.each_mut().map(|views| views.next().expect("each head has its columns"));
            (span, head, taken.split_off_mut(..states_len).expect("there is room for each head"), views)
        })
    });
    let sums = workers.map(tasks, |(span, head, states, gradients)| {
        of_document(workers, recorded, (span, head), states, gradients)
    });
    // Of every document, the value heads in order.
    combine(sums.chunks(key_heads).map(<[_]>::concat).collect())
}

/// Scratch for the gradients of a chunk.
struct Slopes<A> {
    dq: Scratch<A>,
    dk: Scratch<A>,
    /// Of the output, the corrections, and what they are made from.
    dy: Scratch<A>,
    dnew: Scratch<A>,
    drest: Scratch<A>,
    /// Of the weights and of the system, then of the products of queries and keys, and of keys.
    dweights: Scratch<A>,
    dsystem: Scratch<A>,
    dqk: Scratch<A>,
    dkk: Scratch<A>,
    /// A head of rows.
    heads: Scratch<A>,
    dbeta: [A; CHUNK],
    /// Of the sums of `g` from the first token of the chunk.
    dsums: [A; CHUNK],
}

impl<A: Float> Slopes<A> {
    fn new(workers: &Workers, key_dim: usize, value_dim: usize) -> Self {
        let [dq, dk, heads] = [0; 3].map(|_| workers.scratch(CHUNK * key_dim));
        let [dy, dnew, drest] = [0; 3].map(|_| workers.scratch(CHUNK * value_dim));
        let [dweights, dsystem, dqk, dkk] = [0; 4].map(|_| workers.scratch(CHUNK * CHUNK));
        let (dbeta, dsums) = ([A::ZERO; CHUNK], [A::ZERO; CHUNK]);
        Self { dq, dk, dy, dnew, drest, dweights, dsystem, dqk, dkk, heads, dbeta, dsums }
    }
}

/// Computes the gradients of a document for a key head; returns those of the `a_log` of its value heads.
fn of_document<E: Element>(
    workers: &Workers,
    recorded: Recorded<'_, E>,
    (span, key_head): (&Range<usize>, usize),
    states: &mut [E::Acc],
    mut gradients: Gradients<'_, E>,
) -> Vec<E::Acc> {
    let Recorded { inputs, dy } = recorded;
    let DeltaDims { value_heads, key_dim, value_dim, .. } = inputs.dims;
    let (group, width) = (inputs.dims.group(), inputs.dims.width());
    let [q_column, k_column, v_column] = inputs.columns(key_head);
    let (mut keys, mut decays) = (Keys::new(workers, key_dim), Decays::new(workers));
    let mut corrections = Corrections::new(workers, value_dim);
    let (mut slopes, state_len) = (Slopes::new(workers, key_dim, value_dim), key_dim * value_dim);
    let [mut first, mut dstates] = [0; 2].map(|_| workers.scratch::<E::Acc>(group * state_len));
    first.fill(E::Acc::ZERO);
    dstates.fill(E::Acc::ZERO);
    fill_states(workers, inputs, (span, key_head), &first, states);
    let states = std::iter::once(&first[..]).chain(states.chunks_exact(group * state_len));
    let mut rates = vec![E::Acc::ZERO; group];
    for (rows, states) in chunks(span).rev().zip(states.rev()) {
        let (packed, len) = (inputs.rows(rows.start), rows.len());
        keys.load(packed, width, [q_column, k_column], len);
        slopes.clear(len, key_dim);
        for (index, dstate) in dstates.chunks_exact_mut(state_len).enumerate() {
            let (head, state) = (key_head * group + index, &states[index * state_len..][..state_len]);
            let gates = inputs.gates(rows.clone(), head);
            decays.load(&keys, &gates);
            let values = &packed[v_column + index * value_dim..];
            corrections.load((&keys, &decays), (values, width), (state, value_dim));
            for (row, to) in slopes.dy.chunks_exact_mut(value_dim).take(len).enumerate() {
                cast(&dy[((rows.start + row) * value_heads + head) * value_dim..][..value_dim], to);
            }
            slopes.of_head((&keys, &decays, &mut corrections), (state, dstate), value_dim);
            let first = rows.start - span.start;
            rates[index] += slopes.store_gates(&gates, (first, index), &mut gradients);
            store(&slopes.drest, (len, value_dim), (first, index * value_dim), &mut gradients[2]);
        }
        slopes.store_keys(&keys, rows.start - span.start, &mut gradients);
    }
    rates
}

impl<A: Float> Slopes<A> {
    /// Forgets the gradients that the value heads of a chunk add to.
    fn clear(&mut self, len: usize, key_dim: usize) {
        [&mut self.dq, &mut self.dk].into_iter().for_each(|all| all[..len * key_dim].fill(A::ZERO));
        [&mut self.dqk, &mut self.dkk].into_iter().for_each(|all| all[..len * len].fill(A::ZERO));
    }

    /// Adds the gradients of a value head, from those of its output and of the state after the chunk. `drest` becomes the
    /// gradient of values, and `dstate` that of the state before the chunk.
    fn of_head(
        &mut self,
        (keys, decays, corrections): (&Keys<A>, &Decays<A>, &mut Corrections<A>),
        (state, dstate): (&[A], &mut [A]),
        dim: usize,
    ) {
        let len = keys.len;
        self.dsums[..len].fill(A::ZERO);
        self.of_products((keys, decays, corrections), dstate, dim);
        // The decay of the state over the chunk.
        self.dsums[len - 1] += decays.whole * sum2(state, dstate, |a, b| a * b);
        scale(decays.whole, dstate);
        let state = matrix(state, keys.dim, dim);
        self.of_output((keys, decays), (state, dstate), dim);
        self.of_rest((keys, decays, corrections), dim);
        let (drest, dstate) = (matrix(&corrections.read, len, dim), matrix_mut(dstate, keys.dim, dim));
        product(matrix_mut(&mut self.heads, len, keys.dim), false, drest, state.t(), 1);
        add_scaled(&self.heads[..len * keys.dim], A::ONE, &mut self.dk);
        product(dstate, true, keys.keys().reversed_axes(), drest, 1);
        self.of_decays(keys, decays);
    }

    /// The gradients of the corrections, of what they are made from and by, and of the weights that read them; and of keys
    /// and decays by which the corrections go into the state.
    fn of_products(
        &mut self,
        (keys, decays, corrections): (&Keys<A>, &Decays<A>, &Corrections<A>),
        dstate: &[A],
        dim: usize,
    ) {
        let (len, dstate) = (keys.len, matrix(dstate, keys.dim, dim));
        let (dy, new) = (matrix(&self.dy, len, dim), matrix(&corrections.new, len, dim));
        product(matrix_mut(&mut self.dnew, len, dim), false, keys.keys(), dstate, 1);
        for (row, &decay) in self.dnew.chunks_exact_mut(dim).zip(&decays.to_end[..len]) {
            scale(decay, row);
        }
        product(matrix_mut(&mut self.dnew, len, dim), true, decays.weights().reversed_axes(), dy, 1);
        product(matrix_mut(&mut self.dweights, len, len), false, dy, new.t(), 1);
        let dnew = matrix(&self.dnew, len, dim);
        product(matrix_mut(&mut self.drest, len, dim), false, decays.inverse().reversed_axes(), dnew, 1);
        let drest = matrix(&self.drest, len, dim);
        product(matrix_mut(&mut self.dsystem, len, len), false, drest, new.t(), 1);
        product(matrix_mut(&mut self.heads, len, keys.dim), false, new, dstate.t(), 1);
        for (i, row) in self.heads.chunks_exact(keys.dim).take(len).enumerate() {
            let key = &keys.k[i * keys.dim..][..keys.dim];
            add_scaled(row, decays.to_end[i], &mut self.dk[i * keys.dim..][..keys.dim]);
            let slope = decays.to_end[i] * sum2(row, key, |a, b| a * b);
            self.dsums[i] += -slope;
            self.dsums[len - 1] += slope;
        }
    }

    /// The gradients of queries, decays and the state, by which queries read the state.
    fn of_output(
        &mut self,
        (keys, decays): (&Keys<A>, &Decays<A>),
        (state, dstate): (ndarray::ArrayView2<'_, A>, &mut [A]),
        dim: usize,
    ) {
        let len = keys.len;
        for (row, &decay) in self.dy.chunks_exact_mut(dim).zip(&decays.from_start[..len]) {
            scale(decay, row);
        }
        let dy = matrix(&self.dy, len, dim);
        product(matrix_mut(&mut self.heads, len, keys.dim), false, dy, state.t(), 1);
        for (i, row) in self.heads.chunks_exact(keys.dim).take(len).enumerate() {
            let query = &keys.q[i * keys.dim..][..keys.dim];
            add_scaled(row, A::ONE, &mut self.dq[i * keys.dim..][..keys.dim]);
            self.dsums[i] += sum2(row, query, |a, b| a * b);
        }
        product(matrix_mut(dstate, keys.dim, dim), true, keys.queries().reversed_axes(), dy, 1);
    }

    /// The gradients of `beta`, of values, and of what keys read from the state, which replaces that.
    fn of_rest(
        &mut self,
        (keys, decays, corrections): (&Keys<A>, &Decays<A>, &mut Corrections<A>),
        dim: usize,
    ) {
        for i in 0..keys.len {
            let row = i * dim..(i + 1) * dim;
            let (drest, rest) = (&mut self.drest[row.clone()], &corrections.rest[row.clone()]);
            let (beta, decay) = (decays.beta[i], decays.from_start[i]);
            // `rest` is `beta` times the difference. With a `beta` of zero the difference is lost, and its gradient is zero.
            let along = sum2(drest, rest, |a, b| a * b);
            self.dbeta[i] = if beta == A::ZERO { A::ZERO } else { along / beta };
            scale(beta, drest);
            let read = &mut corrections.read[row];
            self.dsums[i] += -(decay * sum2(drest, read, |a, b| a * b));
            scaled(drest, -decay, read);
        }
    }

    /// The gradients of the products of queries and keys, and of the decays between tokens.
    fn of_decays(&mut self, keys: &Keys<A>, decays: &Decays<A>) {
        let len = keys.len;
        let mut both = [A::ZERO; CHUNK];
        for i in 0..len {
            let seen = i * len..i * len + i + 1;
            let (between, both) = (&decays.between[seen.clone()], &mut both[..=i]);
            let (dsystem, dweights) = (&mut self.dsystem[seen.clone()], &mut self.dweights[seen.clone()]);
            // A token is not corrected by itself.
            dsystem[i] = A::ZERO;
            let of_system = gradient_row(dsystem, between, &keys.kk[seen.clone()], -A::ONE, both, false);
            self.dbeta[i] += of_system;
            scale(decays.beta[i], both);
            add_scaled(dsystem, decays.beta[i], &mut self.dkk[seen.clone()]);
            let of_weights = gradient_row(dweights, between, &keys.qk[seen.clone()], A::ONE, both, true);
            add_scaled(dweights, A::ONE, &mut self.dqk[seen]);
            self.dsums[i] += of_system * decays.beta[i] + of_weights;
            subtract(both, &mut self.dsums);
        }
    }

    /// Writes the gradients of gates from those of `beta` and of sums; returns that of the value head's `a_log`.
    fn store_gates<E: Element<Acc = A>>(
        &self,
        gates: &[Gate<A>],
        (first, column): (usize, usize),
        [.., dlogits, da]: &mut Gradients<'_, E>,
    ) -> A {
        let (mut dg, mut rate) = (A::ZERO, A::ZERO);
        for (i, gate) in gates.iter().enumerate().rev() {
            dg += self.dsums[i];
            rate += dg * gate.g;
            da[[first + i, column]] = E::store(dg * gate.slope);
            dlogits[[first + i, column]] = E::store(self.dbeta[i] * gate.beta * (A::ONE - gate.beta));
        }
        rate
    }

    /// Writes the gradients of queries and keys, from those of all value heads.
    fn store_keys<E: Element<Acc = A>>(
        &mut self,
        keys: &Keys<A>,
        first: usize,
        [dq, dk, ..]: &mut Gradients<'_, E>,
    ) {
        let (len, dim) = (keys.len, keys.dim);
        let (dqk, dkk) = (matrix(&self.dqk, len, len), matrix(&self.dkk, len, len));
        product(matrix_mut(&mut self.dq, len, dim), true, dqk, keys.keys(), 1);
        product(matrix_mut(&mut self.dk, len, dim), true, dqk.t(), keys.queries(), 1);
        product(matrix_mut(&mut self.dk, len, dim), true, dkk, keys.keys(), 1);
        product(matrix_mut(&mut self.dk, len, dim), true, dkk.t(), keys.keys(), 1);
        let scale = A::of(1.0 / (dim as f64).sqrt());
        for i in 0..len {
            let row = i * dim..(i + 1) * dim;
            let [of_q, of_k] = keys.inverse_norms.map(|norms| norms[i]);
            undo_norm(&keys.q[row.clone()], [of_q * scale, scale], &mut self.dq[row.clone()]);
            undo_norm(&keys.k[row.clone()], [of_k, A::ONE], &mut self.dk[row]);
        }
        store(&self.dq, (len, dim), (first, 0), dq);
        store(&self.dk, (len, dim), (first, 0), dk);
    }
}

vectorized! {
    /// Replaces the gradients of products times decays by those of the products, with a sign; writes (or adds) the products of
    /// gradients and values, which are the gradients of the decays' exponents, and returns their sum.
    fn gradient_row<A: Float>(
        slopes: &mut [A], between: &[A], products: &[A], sign: A, both: &mut [A], adds: bool,
    ) -> A {
        for (((slope, &between), &product), both) in slopes.iter_mut().zip(between).zip(products).zip(both.iter_mut()) {
            *slope = sign * *slope * between;
            let of_exponent = *slope * product;
            *both = if adds { *both + of_exponent } else { of_exponent };
        }
        sum2(slopes, products, |slope, product| slope * product)
    }
}

vectorized! {
    fn subtract<A: Float>(values: &[A], from: &mut [A]) {
        for (from, &value) in from.iter_mut().zip(values) {
            *from = *from - value;
        }
    }
}

vectorized! {
    /// Replaces the gradient of a head that was divided by its norm (and multiplied by the second factor) by that of the head;
    /// the first factor is the quotient of that factor and the norm.
    fn undo_norm<A: Float>(head: &[A], factors: [A; 2], slopes: &mut [A]) {
        let [factor, scale] = factors;
        let along = sum2(slopes, head, |a, b| a * b) / (scale * scale);
        for (slope, &x) in slopes.iter_mut().zip(head) {
            *slope = factor * (*slope - x * along);
        }
    }
}

/// Rounds rows into columns of a view.
fn store<E: Element>(
    rows: &[E::Acc],
    (len, dim): (usize, usize),
    (first, column): (usize, usize),
    into: &mut ArrayViewMut2<'_, E>,
) {
    for (row, from) in rows.chunks_exact(dim).take(len).enumerate() {
        let mut to = into.row_mut(first + row);
        let to = &mut to.as_slice_mut().expect("columns of a row are contiguous")[column..];
        to.iter_mut().zip(from).for_each(|(to, &from)| *to = E::store(from));
    }
}
