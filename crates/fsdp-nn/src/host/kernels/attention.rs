//! Causal attention with grouped queries, by blocks of query rows.
//!
//! A task is a (sample, key head) with all query heads that read it. Its rows are copied to contiguous scratch in the
//! type of arithmetic. Blocks of query positions, with the rows of all heads of the group stacked, are then
//! multiplied with the keys from the first to the last one that they see. As a result, each thread holds no more than
//! about [`STACKED_ROWS`] rows of scores, blocks right of the causal diagonal or left of a window are not computed,
//! and the gradients of keys and values are summed over heads inside the product. Backward recomputes probabilities
//! from the saved log-sum-exps, starting with the last block: unless there is a window, that block covers all keys,
//! so it overwrites the gradients and the others add to them.

mod cached;
mod rows;
mod sinks;

use std::ops::Range;

use fsdp_core::Error;
use ndarray::{ArrayView2, ArrayViewMut2, Axis};

use self::rows::{Row, cap_row, gradient_row, multiply, project, show, softmax_row, store_scaled};
use super::pointwise::dropout_factors;
use super::rope::rotate_heads;
use crate::backend::{BatchFacts, Outcome};
use crate::host::HostMemory;
use crate::host::backend::Call;
use crate::host::element::{Element, Float};
use crate::host::floats::cast;
use crate::host::raw::product;
use crate::host::workers::Workers;
use crate::op::{Attention, AttentionDims, Dropout, Scores};

/// Rows of scores (positions times heads of a group) that are computed together.
const STACKED_ROWS: usize = 128;
/// Minimum number of positions in a block, independent of the number of heads in a group.
const BLOCK_MIN: usize = 16;

impl HostMemory {
    pub(in crate::host) fn attention<E: Element>(
        &self,
        op: &Attention,
        operands: Call<'_, '_>,
    ) -> Result<Outcome, Error> {
        let batch = operands.batch;
        match op {
            Attention::Rope { dims, rope, backward, .. } => {
                let positions = operands.reads.first().map(|slice| self.elements(*slice)).transpose()?;
                let ([], [qkv], _) = operands.split();
                let qkv = self.elements_mut::<E>(qkv.slice)?;
                rotate_heads(self.workers(), *dims, rope, positions, qkv, *backward);
            }
            Attention::Forward { dims, scores } => {
                let ([qkv], [y, lse], _) = operands.split();
                let qkv = self.elements::<E>(qkv)?;
                let (y, lse) = (self.elements_mut(y.slice)?, self.elements_mut(lse.slice)?);
                forward(self.workers(), *dims, (*scores, batch), qkv, y, lse);
            }
            Attention::Backward { dims, scores } => {
                let ([qkv, y, lse, dy], [dqkv], _) = operands.split();
                let recorded = Recorded {
                    qkv: self.elements::<E>(qkv)?,
                    y: self.elements(y)?,
                    lse: self.elements(lse)?,
                    dy: self.elements(dy)?,
                };
                backward(self.workers(), *dims, (*scores, batch), recorded, self.elements_mut(dqkv.slice)?);
            }
            Attention::Sink { dims } => {
                let ([sinks], [y, lse], _) = operands.split();
                let sinks = self.elements::<E>(sinks)?;
                let (y, lse) = (self.elements_mut(y.slice)?, self.elements_mut(lse.slice)?);
                sinks::forward(self.workers(), *dims, sinks, y, lse);
            }
            Attention::SinkBackward { dims } => {
                let ([sinks, y, lse, dy], [dsinks], _) = operands.split();
                let rows = [self.elements::<E>(sinks)?, self.elements(y)?, self.elements(dy)?];
                let (lse, dsinks) = (self.elements(lse)?, self.elements_mut(dsinks.slice)?);
                sinks::backward(self.workers(), *dims, rows, lse, dsinks);
            }
        }
        Ok(Outcome::Done)
    }
}

/// The common data of all blocks of one (sample, document, key head). Positions are counted within the document.
#[derive(Clone, Copy)]
struct Group<'a> {
    /// The document's first position in its sample.
    origin: usize,
    /// Number of positions in the document.
    len: usize,
    head_dim: usize,
    /// Number of query heads in the group.
    heads: usize,
    first_head: usize,
    dropout: Option<(Dropout<'a>, u64)>,
    scores: Scores,
    /// End of the keys that any query sees.
    keys_end: usize,
    dims: &'a AttentionDims,
}

/// Query positions `start .. start + len`, which see keys `first .. start + len`.
#[derive(Clone, Copy)]
struct Block {
    start: usize,
    len: usize,
    first: usize,
}

impl<'a> Group<'a> {
    /// Returns the groups of a sample's documents, or of the sample as a single document.
    fn of_sample(
        dims: &'a AttentionDims,
        (scores, batch): (Scores, BatchFacts<'a>),
        sample: usize,
        kv_head: usize,
    ) -> impl Iterator<Item = Self> + use<'a> {
        let (AttentionDims { seq, head_dim, .. }, first_row) = (*dims, sample * dims.seq);
        let heads = dims.heads / dims.kv_heads;
        let dropout = scores.dropout(batch.keys).map(|dropout| (dropout, batch.keys[sample]));
        let of_rows = move |rows: Range<usize>| Self {
            origin: rows.start - first_row,
            len: rows.len(),
            head_dim,
            heads,
            first_head: kv_head * heads,
            dropout,
            scores,
            keys_end: batch.keys_ends.get(sample).map_or(usize::MAX, |end| (*end).max(1)),
            dims,
        };
        let documents = if scores.packed { batch.documents } else { &[] };
        let from = documents.partition_point(|rows| rows.start < first_row);
        let of_sample =
            documents[from..].iter().cloned().take_while(move |rows| rows.start < first_row + seq);
        let whole = (!scores.packed).then_some(first_row..first_row + seq);
        of_sample.chain(whole).map(of_rows)
    }

    fn blocks(&self) -> impl DoubleEndedIterator<Item = Block> + use<> {
        let (len, step, scores) = (self.len, self.block_len(), self.scores);
        (0..len).step_by(step).map(move |start| Block {
            start,
            len: step.min(len - start),
            first: scores.first_key(start),
        })
    }

    /// The keys of a block that one of its queries sees, relative to the block's first key.
    fn visible(&self, block: Block, query: usize) -> Range<usize> {
        let end = (query + 1).min(self.keys_end);
        self.scores.first_key(query).min(end - 1).max(block.first) - block.first
            ..end.max(block.first + 1) - block.first
    }

    fn block_len(&self) -> usize {
        (STACKED_ROWS / self.heads).max(BLOCK_MIN).min(self.len)
    }

    /// Number of rows of the largest block.
    fn stacked_rows(&self) -> usize {
        self.heads * self.block_len()
    }

    fn column(&self, head: usize) -> usize {
        (self.first_head + head) * self.head_dim
    }

    /// Returns the first columns of the key head and of the value head in a packed row.
    fn kv_columns(&self) -> (usize, usize) {
        let key = self.dims.heads + self.first_head / self.heads;
        (key * self.head_dim, (key + self.dims.kv_heads) * self.head_dim)
    }

    /// Copies positions `start ..` of one head from rows of `width` elements.
    fn load<E: Element>(&self, rows: &[E], width: usize, column: usize, start: usize, into: &mut [E::Acc]) {
        for (position, into) in into.chunks_exact_mut(self.head_dim).enumerate() {
            let from = (self.origin + start + position) * width + column;
            cast(&rows[from..from + self.head_dim], into);
        }
    }

    /// Copies a block's positions of all heads of the group, head by head, from rows of `width` elements.
    fn stack<E: Element>(&self, rows: &[E], width: usize, block: Block, into: &mut [E::Acc]) {
        for (head, into) in into.chunks_exact_mut(block.len * self.head_dim).enumerate() {
            self.load(rows, width, self.column(head), block.start, into);
        }
    }

    /// Computes the dropout factors of a row of scores, starting at `first_key`; returns whether there is dropout.
    fn factors<A: Float>(&self, [head, query, first_key]: [usize; 3], factors: &mut [A]) -> bool {
        let Some((dropout, key)) = self.dropout else { return false };
        let row = (self.first_head + head) * self.dims.seq + self.origin + query;
        dropout_factors(dropout, key, (row * self.dims.seq + self.origin + first_key) as u64, factors);
        true
    }
}

impl Block {
    /// Number of keys that some row of the block sees.
    fn keys(&self) -> usize {
        self.start + self.len - self.first
    }

    /// Returns the rows of these keys; each row has `dim` elements.
    fn of_keys<'a, A: Float>(&self, rows: &'a [A], dim: usize) -> ArrayView2<'a, A> {
        matrix(&rows[self.first * dim..], self.keys(), dim)
    }

    fn of_keys_mut<'a, A: Float>(&self, rows: &'a mut [A], dim: usize) -> ArrayViewMut2<'a, A> {
        matrix_mut(&mut rows[self.first * dim..], self.keys(), dim)
    }
}

/// Views contiguous rows as a matrix.
pub(super) fn matrix<A: Float>(data: &[A], rows: usize, cols: usize) -> ArrayView2<'_, A> {
    ArrayView2::from_shape((rows, cols), &data[..rows * cols]).expect("a slice of rows times columns")
}

/// Views contiguous rows as a writable matrix.
pub(super) fn matrix_mut<A: Float>(data: &mut [A], rows: usize, cols: usize) -> ArrayViewMut2<'_, A> {
    ArrayViewMut2::from_shape((rows, cols), &mut data[..rows * cols]).expect("a slice of rows times columns")
}

/// Splits a matrix into blocks of `width` columns.
pub(super) fn columns<E>(view: ArrayViewMut2<'_, E>, width: usize) -> Vec<ArrayViewMut2<'_, E>> {
    let mut blocks = Vec::new();
    let mut rest = view;
    while rest.ncols() > 0 {
        let (block, others) = rest.split_at(Axis(1), width);
        blocks.push(block);
        rest = others;
    }
    blocks
}

/// Splits the rows of one sample into the columns of heads.
fn sample_columns<E>(rows: &mut [E], seq: usize, width: usize, block: usize) -> Vec<ArrayViewMut2<'_, E>> {
    let view = ArrayViewMut2::from_shape((seq, width), rows).expect("a sample is whole rows");
    columns(view, block)
}

/// Computes attention and its log-sum-exps.
fn forward<E: Element>(
    workers: &Workers,
    dims: AttentionDims,
    scores: (Scores, BatchFacts<'_>),
    qkv: &[E],
    y: &mut [E],
    lse: &mut [E::Acc],
) {
    let (seq, width) = (dims.seq, dims.heads * dims.head_dim);
    let group_heads = dims.heads / dims.kv_heads;
    let samples = y.chunks_mut(seq * width).zip(lse.chunks_mut(dims.heads * seq)).enumerate();
    let tasks = samples.flat_map(|(sample, (y, lse))| {
        let groups = sample_columns(y, seq, width, group_heads * dims.head_dim);
        let groups = groups.into_iter().zip(lse.chunks_mut(group_heads * seq)).enumerate();
        groups.map(move |(kv_head, (y, lse))| (sample, kv_head, y, lse))
    });
    workers.each(tasks, |(sample, kv_head, mut y, lse)| {
        let packed = &qkv[sample * seq * dims.packed()..][..seq * dims.packed()];
        for group in Group::of_sample(&dims, scores, sample, kv_head) {
            forward_group(workers, group, packed, y.view_mut(), lse);
        }
    });
}

fn forward_group<E: Element>(
    workers: &Workers,
    group: Group<'_>,
    packed: &[E],
    mut y: ArrayViewMut2<'_, E>,
    lse: &mut [E::Acc],
) {
    let (len, dim, width) = (group.len, group.head_dim, group.dims.packed());
    let stacked = group.stacked_rows();
    let mut scratch = workers.scratch::<E::Acc>(2 * len * dim + stacked * (len + 2 * dim + 1) + len);
    let (keys, rest) = scratch.split_at_mut(len * dim);
    let (values, rest) = rest.split_at_mut(len * dim);
    let (queries, rest) = rest.split_at_mut(stacked * dim);
    let (outputs, rest) = rest.split_at_mut(stacked * dim);
    let (scales, rest) = rest.split_at_mut(stacked);
    let (factors, scores) = rest.split_at_mut(len);
    let (key_column, value_column) = group.kv_columns();
    group.load(packed, width, key_column, 0, keys);
    group.load(packed, width, value_column, 0, values);
    for block in group.blocks() {
        let (rows, key_count) = (group.heads * block.len, block.keys());
        let (queries, scores) = (&mut queries[..rows * dim], &mut scores[..rows * key_count]);
        group.stack(packed, width, block, queries);
        let transposed = block.of_keys(keys, dim).reversed_axes();
        product(matrix_mut(scores, rows, key_count), false, matrix(queries, rows, dim), transposed, 1);
        for (row, scores) in scores.chunks_exact_mut(key_count).enumerate() {
            let (head, query) = (row / block.len, block.start + row % block.len);
            let visible = group.visible(block, query);
            let (first_key, factors) = (block.first + visible.start, &mut factors[..visible.len()]);
            let scores = show(visible, scores);
            let remaining_scale = group.cap(scores, factors);
            let (log_sum, scale) = softmax_row(remaining_scale, scores);
            lse[head * group.dims.seq + group.origin + query] = log_sum;
            scales[row] = scale;
            if group.factors([head, query, first_key], factors) {
                multiply(factors, scores);
            }
        }
        let visible_values = block.of_keys(values, dim);
        product(matrix_mut(outputs, rows, dim), false, matrix(scores, rows, key_count), visible_values, 1);
        for (row, output) in outputs[..rows * dim].chunks_exact_mut(dim).enumerate() {
            let (head, query) = (row / block.len, block.start + row % block.len);
            let mut y = y.row_mut(group.origin + query);
            let y = y.as_slice_mut().expect("columns of contiguous rows");
            store_scaled(scales[row], output, &mut y[head * dim..][..dim]);
        }
    }
}

impl Group<'_> {
    fn scale<A: Float>(&self) -> A {
        A::of(self.scores.scale(self.head_dim))
    }

    /// Rounds stacked rows into the columns of their heads.
    fn unstack<E: Element>(&self, block: Block, stacked: &[E::Acc], into: &mut ArrayViewMut2<'_, E>) {
        let dim = self.head_dim;
        for (row, from) in stacked.chunks_exact(dim).enumerate() {
            let mut to = into.row_mut(self.origin + block.start + row % block.len);
            let to = to.as_slice_mut().expect("columns of contiguous rows");
            cast(from, &mut to[row / block.len * dim..][..dim]);
        }
    }

    /// Scales and caps the scores if there is a cap; returns the remaining scale factor. `slopes` receives the
    /// factors for the gradients of capped scores.
    fn cap<A: Float>(&self, scores: &mut [A], slopes: &mut [A]) -> A {
        let Some(cap) = self.scores.softcap else { return self.scale() };
        cap_row(self.scale(), A::of(cap), scores, slopes);
        A::ONE
    }
}

/// Backward of [`forward`].
fn backward<E: Element>(
    workers: &Workers,
    dims: AttentionDims,
    scores: (Scores, BatchFacts<'_>),
    inputs: Recorded<'_, E>,
    dqkv: &mut [E],
) {
    let (seq, dim, packed) = (dims.seq, dims.head_dim, dims.packed());
    let group_heads = dims.heads / dims.kv_heads;
    let tasks = dqkv.chunks_mut(seq * packed).enumerate().flat_map(|(sample, rows)| {
        let view = ArrayViewMut2::from_shape((seq, packed), rows).expect("a sample is whole rows");
        let (dq, rest) = view.split_at(Axis(1), dims.heads * dim);
        let (dk, dv) = rest.split_at(Axis(1), dims.kv_heads * dim);
        let groups = columns(dq, group_heads * dim).into_iter().zip(columns(dk, dim)).zip(columns(dv, dim));
        groups.enumerate().map(move |(kv_head, ((dq, dk), dv))| (sample, kv_head, [dq, dk, dv]))
    });
    workers.each(tasks, |(sample, kv_head, mut gradients)| {
        for group in Group::of_sample(&dims, scores, sample, kv_head) {
            let [dq, dk, dv] = &mut gradients;
            let gradients = [dq.view_mut(), dk.view_mut(), dv.view_mut()];
            backward_group(workers, group, inputs.sample(dims, sample), gradients);
        }
    });
}

/// The inputs and outputs of forward, and the gradient of the output.
struct Recorded<'a, E: Element> {
    qkv: &'a [E],
    y: &'a [E],
    lse: &'a [E::Acc],
    dy: &'a [E],
}

impl<'a, E: Element> Recorded<'a, E> {
    fn sample(&self, dims: AttentionDims, sample: usize) -> Self {
        let (packed, width) = (dims.seq * dims.packed(), dims.seq * dims.heads * dims.head_dim);
        Self {
            qkv: &self.qkv[sample * packed..][..packed],
            y: &self.y[sample * width..][..width],
            lse: &self.lse[sample * dims.heads * dims.seq..][..dims.heads * dims.seq],
            dy: &self.dy[sample * width..][..width],
        }
    }
}

fn backward_group<E: Element>(
    workers: &Workers,
    group: Group<'_>,
    inputs: Recorded<'_, E>,
    gradients: [ArrayViewMut2<'_, E>; 3],
) {
    let (len, dim, packed) = (group.len, group.head_dim, group.dims.packed());
    let (stacked, width) = (group.stacked_rows(), group.dims.heads * group.head_dim);
    let mut scratch = workers.scratch::<E::Acc>(4 * len * dim + stacked * (2 * len + 3 * dim) + len);
    let (keys, rest) = scratch.split_at_mut(len * dim);
    let (values, rest) = rest.split_at_mut(len * dim);
    let (dkeys, rest) = rest.split_at_mut(len * dim);
    let (dvalues, rest) = rest.split_at_mut(len * dim);
    let (queries, rest) = rest.split_at_mut(stacked * dim);
    let (doutputs, rest) = rest.split_at_mut(stacked * dim);
    let (dqueries, rest) = rest.split_at_mut(stacked * dim);
    let (factors, rest) = rest.split_at_mut(len);
    let (scores, dscores) = rest.split_at_mut(stacked * len);
    let mut slopes = workers.scratch::<E::Acc>(if group.scores.softcap.is_some() { len } else { 0 });
    let is_windowed = group.scores.window.is_some();
    if is_windowed {
        dkeys.fill(E::Acc::ZERO);
        dvalues.fill(E::Acc::ZERO);
    }
    let (key_column, value_column) = group.kv_columns();
    group.load(inputs.qkv, packed, key_column, 0, keys);
    group.load(inputs.qkv, packed, value_column, 0, values);
    let [mut dq, dk, dv] = gradients;
    for (index, block) in group.blocks().rev().enumerate() {
        let (rows, key_count) = (group.heads * block.len, block.keys());
        let scores = &mut scores[..rows * key_count];
        let dscores = &mut dscores[..rows * key_count];
        group.stack(inputs.qkv, packed, block, &mut queries[..rows * dim]);
        group.stack(inputs.dy, width, block, &mut doutputs[..rows * dim]);
        let (q, dout) = (matrix(queries, rows, dim), matrix(doutputs, rows, dim));
        let (k, v) = (block.of_keys(keys, dim), block.of_keys(values, dim));
        product(matrix_mut(scores, rows, key_count), false, q, k.reversed_axes(), 1);
        product(matrix_mut(dscores, rows, key_count), false, dout, v.reversed_axes(), 1);
        for (row, (scores, dscores)) in
            scores.chunks_exact_mut(key_count).zip(dscores.chunks_exact_mut(key_count)).enumerate()
        {
            let (head, query) = (row / block.len, block.start + row % block.len);
            let row_of_sample = group.origin + query;
            let y = &inputs.y[row_of_sample * width + group.column(head)..][..dim];
            let log_sum = inputs.lse[(group.first_head + head) * group.dims.seq + row_of_sample];
            let visible = group.visible(block, query);
            let (first_key, factors) = (block.first + visible.start, &mut factors[..visible.len()]);
            let dropped = group.factors([head, query, first_key], factors);
            let slopes = slopes.get_mut(..visible.len()).unwrap_or_default();
            let (scores, dscores) = (show(visible.clone(), scores), show(visible, dscores));
            let scale = group.cap(scores, slopes);
            let shared = Row { scale, log_sum, projection: project(&doutputs[row * dim..][..dim], y) };
            gradient_row(shared, dropped.then_some(&*factors), scores, dscores);
            multiply(slopes, dscores);
        }
        let (p, ds) = (matrix(scores, rows, key_count), matrix(dscores, rows, key_count));
        let adds = index > 0 || is_windowed;
        product(block.of_keys_mut(dvalues, dim), adds, p.reversed_axes(), dout, 1);
        product(block.of_keys_mut(dkeys, dim), adds, ds.reversed_axes(), q, 1);
        product(matrix_mut(dqueries, rows, dim), false, ds, k, 1);
        group.unstack(block, &dqueries[..rows * dim], &mut dq);
    }
    let all = Block { start: 0, len, first: 0 };
    group.unstack(all, dkeys, &mut { dk });
    group.unstack(all, dvalues, &mut { dv });
}
