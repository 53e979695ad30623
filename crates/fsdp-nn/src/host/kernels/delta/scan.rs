//! Forward of the gated delta rule. A task is a document with one key head and the value heads that use it.

use std::ops::Range;

use ndarray::ArrayViewMut2;

use super::chunk::{Corrections, Decays, Gate, Keys, scale};
use crate::host::element::{Element, Float};
use crate::host::kernels::attention::{columns, matrix, matrix_mut};
use crate::host::raw::product;
use crate::host::workers::Workers;
use crate::op::{CHUNK, DeltaDims};

/// The operands of forward.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a, E> {
    pub(super) dims: DeltaDims,
    pub(super) qkv: &'a [E],
    pub(super) gates: &'a [E],
    pub(super) a_log: &'a [E],
    pub(super) dt_bias: &'a [E],
}

impl<'a, E: Element> Inputs<'a, E> {
    /// The first columns of a query head, its key head, and its first value head.
    pub(super) fn columns(&self, key_head: usize) -> [usize; 3] {
        let DeltaDims { key_heads, key_dim, value_dim, .. } = self.dims;
        let values = 2 * key_heads * key_dim + key_head * self.dims.group() * value_dim;
        [key_head * key_dim, (key_heads + key_head) * key_dim, values]
    }

    /// The packed rows from `row` on.
    pub(super) fn rows(&self, row: usize) -> &'a [E] {
        &self.qkv[row * self.dims.width()..]
    }

    /// The gates of a value head in the rows of a chunk.
    pub(super) fn gates(&self, rows: Range<usize>, head: usize) -> Vec<Gate<E::Acc>> {
        let heads = self.dims.value_heads;
        let rate = self.a_log[head].load().as_f64().exp();
        let gate = |row: usize| {
            let gates = &self.gates[row * 2 * heads..];
            Gate::new(gates[head].load(), gates[heads + head].load() + self.dt_bias[head].load(), rate)
        };
        rows.map(gate).collect()
    }
}

/// The rows of a document in chunks.
pub(super) fn chunks(rows: &Range<usize>) -> impl DoubleEndedIterator<Item = Range<usize>> + use<> {
    let end = rows.end;
    (0..rows.len().div_ceil(CHUNK)).map({
        let start = rows.start;
        move |chunk| start + chunk * CHUNK..(start + (chunk + 1) * CHUNK).min(end)
    })
}

/// Splits rows into documents and their columns; the tasks are ordered by document, then column block.
pub(super) fn by_document<'a, E>(
    mut rows: &'a mut [E],
    width: usize,
    spans: &[Range<usize>],
    block: usize,
) -> impl Iterator<Item = ArrayViewMut2<'a, E>> + use<'a, E> {
    let mut all = Vec::new();
    for span in spans {
        let (document, others) = rows.split_at_mut(span.len() * width);
        let view =
            ArrayViewMut2::from_shape((span.len(), width), document).expect("a document is whole rows");
        all.extend(columns(view, block));
        rows = others;
    }
    all.into_iter()
}

/// Computes the output of all documents.
pub(super) fn forward<E: Element>(
    workers: &Workers,
    inputs: Inputs<'_, E>,
    spans: &[Range<usize>],
    y: &mut [E],
) {
    let DeltaDims { key_heads, value_heads, value_dim, .. } = inputs.dims;
    let outputs = by_document(y, value_heads * value_dim, spans, inputs.dims.group() * value_dim);
    let heads = spans.iter().flat_map(|span| (0..key_heads).map(move |head| (span, head)));
    workers.each(heads.zip(outputs), |((span, key_head), y)| {
        let len = inputs.dims.group() * inputs.dims.key_dim * value_dim;
        let mut states = workers.scratch::<E::Acc>(len);
        states.fill(E::Acc::ZERO);
        of_document(workers, inputs, (span, key_head), &mut states, y);
    });
}

/// Computes the output of a document for the value heads of a key head, whose states go from those before the document to
/// those after it.
pub(super) fn of_document<E: Element>(
    workers: &Workers,
    inputs: Inputs<'_, E>,
    (span, key_head): (&Range<usize>, usize),
    states: &mut [E::Acc],
    mut y: ArrayViewMut2<'_, E>,
) {
    let DeltaDims { key_dim, value_dim, .. } = inputs.dims;
    let [q_column, k_column, v_column] = inputs.columns(key_head);
    let (mut keys, mut decays) = (Keys::new(workers, key_dim), Decays::new(workers));
    let mut corrections = Corrections::new(workers, value_dim);
    let mut output = workers.scratch::<E::Acc>(CHUNK * value_dim);
    for rows in chunks(span) {
        let (packed, width) = (inputs.rows(rows.start), inputs.dims.width());
        keys.load(packed, width, [q_column, k_column], rows.len());
        for (index, state) in states.chunks_exact_mut(key_dim * value_dim).enumerate() {
            let head = key_head * inputs.dims.group() + index;
            decays.load(&keys, &inputs.gates(rows.clone(), head));
            let values = &packed[v_column + index * value_dim..];
            corrections.load((&keys, &decays), (values, width), (state, value_dim));
            read(&keys, &decays, &corrections, (state, value_dim), &mut output);
            corrections.advance(&keys, &decays, (state, value_dim));
            for (row, from) in output.chunks_exact(value_dim).take(rows.len()).enumerate() {
                let mut to = y.row_mut(rows.start - span.start + row);
                let to =
                    &mut to.as_slice_mut().expect("columns of a row are contiguous")[index * value_dim..];
                to.iter_mut().zip(from).for_each(|(to, &from)| *to = E::store(from));
            }
        }
    }
}

/// Computes the states before every chunk of a document but the first, chunk by chunk.
pub(super) fn fill_states<'a, E: Element>(
    workers: &Workers,
    inputs: Inputs<'_, E>,
    (span, key_head): (&Range<usize>, usize),
    mut before: &'a [E::Acc],
    states: &'a mut [E::Acc],
) {
    let DeltaDims { key_dim, value_dim, .. } = inputs.dims;
    let (group, width) = (inputs.dims.group(), inputs.dims.width());
    let [q_column, k_column, v_column] = inputs.columns(key_head);
    let state_len = key_dim * value_dim;
    let (mut keys, mut decays) = (Keys::new(workers, key_dim), Decays::new(workers));
    let mut corrections = Corrections::new(workers, value_dim);
    for (rows, after) in chunks(span).zip(states.chunks_exact_mut(group * state_len)) {
        after.copy_from_slice(before);
        let packed = inputs.rows(rows.start);
        keys.load(packed, width, [q_column, k_column], rows.len());
        for (index, state) in after.chunks_exact_mut(state_len).enumerate() {
            decays.load(&keys, &inputs.gates(rows.clone(), key_head * group + index));
            let values = &packed[v_column + index * value_dim..];
            corrections.load((&keys, &decays), (values, width), (state, value_dim));
            corrections.advance(&keys, &decays, (state, value_dim));
        }
        before = after;
    }
}

/// Reads the state and the corrections of a chunk with its queries.
fn read<A: Float>(
    keys: &Keys<A>,
    decays: &Decays<A>,
    corrections: &Corrections<A>,
    (state, dim): (&[A], usize),
    output: &mut [A],
) {
    let len = keys.len;
    product(matrix_mut(output, len, dim), false, keys.queries(), matrix(state, keys.dim, dim), 1);
    for (row, &decay) in output.chunks_exact_mut(dim).zip(&decays.from_start[..len]) {
        scale(decay, row);
    }
    product(matrix_mut(output, len, dim), true, decays.weights(), matrix(&corrections.new, len, dim), 1);
}
