//! Attention composed of libtorch's operations, with its scores in memory, in the arithmetic type.
//!
//! All scores of a call would be (samples x heads x positions x positions) numbers, several times over: more than a
//! GPU's memory. So they are computed block by block. A block consists of whole samples if their scores fit; else of
//! heads of one sample, with heads that read the same key head kept together; else of some query positions of one such
//! group. The queries of a group are stacked, so that one product covers all of them, and sums over the heads of a
//! group are sums over rows. Blocks depend only on shapes, and on documents where samples hold several: a block never
//! spans documents.

#[cfg(test)]
mod tests;

use std::ops::Range;

use fsdp_core::DType;
use fsdp_core::memory::Slice;
use fsdp_nn::backend::{AttentionDims, BatchFacts, Dropout};
use fsdp_nn::op::Scores;
use tch::{Kind, Tensor};

use crate::torch::error::{Done, Failure};
use crate::torch::memory::Torch;
use crate::torch::ops::int;
use crate::torch::ops::pointwise::factors;
use crate::torch::storage::TorchStorage;

/// Maximum number of scores in a block: 256 MiB in f32. The forward pass needs at most two temporaries of this size at
/// once (scores, and their exponentials or the dropout factors), the backward pass three (probabilities, their
/// gradients, and the factors; a cap adds one).
const SCORES_MAX: usize = 1 << 26;

/// A unit of computation: samples, groups of heads, and positions of queries.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Block {
    samples: Range<usize>,
    /// Key heads, each together with the query heads that read it.
    groups: Range<usize>,
    /// Positions of queries.
    rows: Range<usize>,
    /// Positions of keys that any of these queries sees: up to the last query's own.
    keys: Range<usize>,
}

/// Maximum number of query positions in a block with a window, unless the window is wider: a block reads as many keys
/// before its own positions as the window has.
const WINDOW_ROWS: usize = 256;

/// Splits `0..end` into ranges of length `step`, or 1 if `step` is 0.
fn ranges(end: usize, step: usize) -> impl DoubleEndedIterator<Item = Range<usize>> {
    let step = step.max(1);
    (0..end).step_by(step).map(move |start| start..end.min(start + step))
}

/// A range of a tensor along `dim`.
fn part(tensor: &Tensor, dim: i64, range: &Range<usize>) -> Result<Tensor, Failure> {
    Ok(tensor.f_narrow(dim, int(range.start), int(range.len()))?)
}

/// The arithmetic type.
fn arithmetic(operand: &Tensor) -> Result<Kind, Failure> {
    Ok(if operand.f_kind()? == Kind::Double { Kind::Double } else { Kind::Float })
}

/// Zeros for the gradients of a span's keys or values, shaped like those of a block: (samples, groups, positions,
/// elements).
fn zeros(span: &Block, like: &Tensor) -> Result<Tensor, Failure> {
    let mut sizes = like.size();
    sizes[2] = int(span.keys.len());
    Ok(Tensor::f_zeros(&sizes, (like.f_kind()?, like.device()))?)
}

/// The composition for one call. Operands and results are (batch, heads, positions, elements); statistics are (batch,
/// heads, positions).
pub(super) struct Composed<'a, D: TorchStorage> {
    torch: &'a Torch<D>,
    dims: AttentionDims,
    scores: Scores,
    dropout: Option<Dropout<'a>>,
    /// The rows of each document; `None` unless samples hold several.
    documents: Option<&'a [Range<usize>]>,
    /// Maximum number of scores in a block with more than one position.
    scores_max: usize,
}

impl<'a, D: TorchStorage> Composed<'a, D> {
    pub(super) fn new(
        torch: &'a Torch<D>,
        dims: AttentionDims,
        (scores, batch): (Scores, BatchFacts<'a>),
    ) -> Self {
        let (dropout, documents) = (scores.dropout(batch.keys), scores.packed.then_some(batch.documents));
        Self { torch, dims, scores, dropout, documents, scores_max: SCORES_MAX }
    }

    /// Computes the output and the log-sum-exp.
    pub(super) fn forward(&self, [q, k, v]: [&Tensor; 3], [y, lse]: [&Tensor; 2]) -> Result<(), Failure> {
        let lse = lse.f_unsqueeze(-1)?;
        for block in self.spans().flat_map(|span| self.blocks(span)) {
            let mut scores = self.scores(&block, q, k)?;
            let sums = scores.f_logsumexp(-1_i64, true)?;
            self.write(&block, &sums, &lse)?;
            scores.f_sub_(&sums)?.f_exp_().done()?;
            if let Some(factors) = self.factors(&block, scores.f_kind()?)? {
                factors.multiply(self, &block, &mut scores)?;
            }
            self.write(&block, &scores.f_matmul(&self.keys(&block, v)?)?, y)?;
        }
        Ok(())
    }

    /// Computes the gradients of queries, keys and values.
    pub(super) fn backward(
        &self,
        qkv: [&Tensor; 3],
        [y, lse, dy]: [&Tensor; 3],
        [dq_out, dk_out, dv_out]: [&Tensor; 3],
    ) -> Result<(), Failure> {
        let lse = lse.f_unsqueeze(-1)?;
        for span in self.spans() {
            let mut sums: Option<[Tensor; 2]> = None;
            // From the last positions on: these read all keys that the others read, unless there is a window.
            for block in self.blocks(span.clone()).rev() {
                let [dq, dk, dv] = self.gradients(&block, qkv, [y, &lse, dy])?;
                self.write(&block, &dq, dq_out)?;
                if sums.is_none() && block.keys == span.keys {
                    sums = Some([dk, dv]);
                    continue;
                }
                let [keys, values] = match &sums {
                    Some(sums) => sums,
                    None => &*sums.insert([zeros(&span, &dk)?, zeros(&span, &dv)?]),
                };
                let read = block.keys_in(&span);
                part(keys, 2, &read)?.f_add_(&dk).done()?;
                part(values, 2, &read)?.f_add_(&dv).done()?;
            }
            for (sum, to) in sums.iter().flatten().zip([dk_out, dv_out]) {
                part(&span.of_heads(to, 1)?, 2, &span.keys)?.f_copy_(sum)?;
            }
        }
        Ok(())
    }

    /// The gradients of queries, keys and values from one block.
    fn gradients(
        &self,
        block: &Block,
        [q, k, v]: [&Tensor; 3],
        [y, lse, dy]: [&Tensor; 3],
    ) -> Result<[Tensor; 3], Failure> {
        let (queries, dy) = (self.queries(block, q)?, self.queries(block, dy)?);
        let mean = self.queries(block, y)?.f_mul(&dy)?.f_sum_dim_intlist(-1_i64, true, None)?;
        let mut probabilities = self.scores(block, q, k)?;
        let slope_of_cap = self.slope_of_cap(&probabilities)?;
        probabilities.f_sub_(&self.queries(block, lse)?)?.f_exp_().done()?;
        let mut slopes = dy.f_matmul(&self.keys(block, v)?.f_transpose(-2, -1)?)?;
        let factors = self.factors(block, slopes.f_kind()?)?;
        if let Some(factors) = &factors {
            factors.multiply(self, block, &mut slopes)?;
        }
        slopes.f_sub_(&mean)?.f_mul_(&probabilities)?.f_mul_scalar_(self.scale()).done()?;
        if let Some(slope_of_cap) = slope_of_cap {
            slopes.f_mul_(&slope_of_cap).done()?;
        }
        if let Some(factors) = &factors {
            factors.multiply(self, block, &mut probabilities)?;
        }
        Ok([
            slopes.f_matmul(&self.keys(block, k)?)?,
            slopes.f_transpose(-2, -1)?.f_matmul(&queries)?,
            probabilities.f_transpose(-2, -1)?.f_matmul(&dy)?,
        ])
    }

    /// The scaled scores of a block; minus infinity for keys that a query does not see.
    fn scores(&self, block: &Block, q: &Tensor, k: &Tensor) -> Result<Tensor, Failure> {
        let mut scores = self.queries(block, q)?.f_matmul(&self.keys(block, k)?.f_transpose(-2, -1)?)?;
        scores.f_mul_scalar_(self.scale()).done()?;
        if let Some(cap) = self.scores.softcap {
            scores.f_mul_scalar_(1.0 / cap)?.f_tanh_()?.f_mul_scalar_(cap).done()?;
        }
        let (rows, keys) = (int(block.rows.len()), int(block.keys.len()));
        let diagonal = int(block.rows.start) - int(block.keys.start);
        let ones = Tensor::f_ones([rows, keys], (Kind::Bool, scores.device()))?;
        let mut unseen = ones.f_triu(diagonal + 1)?;
        if let Some(window) = self.scores.window {
            unseen = unseen.f_logical_or(&ones.f_tril(diagonal - int(window))?)?;
        }
        let mut by_head = scores.f_view([-1, rows, keys])?;
        by_head.f_masked_fill_(&unseen, f64::NEG_INFINITY).done()?;
        Ok(scores)
    }

    /// Derivative of the cap at each score, 0 for keys that a query does not see; `None` if scores are not capped.
    fn slope_of_cap(&self, scores: &Tensor) -> Result<Option<Tensor>, Failure> {
        let Some(cap) = self.scores.softcap else { return Ok(None) };
        let tanh = scores.f_mul_scalar(1.0 / cap)?;
        Ok(Some(tanh.f_square()?.f_neg()?.f_add_scalar(1.0)?.f_clamp_min(0.0)?))
    }

    fn scale(&self) -> f64 {
        self.scores.scale(self.dims.head_dim)
    }

    /// Number of query heads per key head.
    fn group_size(&self) -> usize {
        self.dims.heads / self.dims.kv_heads
    }

    /// The largest units: blocks over all positions of samples or documents.
    fn spans(&self) -> impl Iterator<Item = Block> {
        let AttentionDims { batch, seq, heads, kv_heads, .. } = self.dims;
        let places: Vec<(Range<usize>, Range<usize>)> = match self.documents {
            None => {
                let samples = self.scores_max / (heads * seq * self.row_len(seq)).max(1);
                ranges(batch, samples).map(|samples| (samples, 0..seq)).collect()
            }
            Some(documents) => {
                let of_document = |rows: &Range<usize>| {
                    let (sample, start) = (rows.start / seq, rows.start % seq);
                    (sample..sample + 1, start..start + rows.len())
                };
                documents.iter().map(of_document).collect()
            }
        };
        places.into_iter().flat_map(move |(samples, rows)| {
            let scores_per_group = self.group_size() * rows.len() * self.row_len(rows.len());
            let groups = (self.scores_max / scores_per_group.max(1)).clamp(1, kv_heads);
            ranges(kv_heads, groups).map(move |groups| Block {
                samples: samples.clone(),
                groups,
                rows: rows.clone(),
                keys: rows.clone(),
            })
        })
    }

    /// Splits a span into blocks.
    fn blocks(&self, span: Block) -> impl DoubleEndedIterator<Item = Block> {
        let len = span.rows.len();
        let rows_max = self.scores_max / (span.heads_len(self.group_size()) * self.row_len(len)).max(1);
        let rows = self.scores.window.map_or(rows_max, |window| rows_max.min(window.max(WINDOW_ROWS)));
        let (scores, first) = (self.scores, span.rows.start);
        ranges(len, rows).map(move |rows| {
            let keys = first + scores.first_key(rows.start)..first + rows.end;
            Block { rows: first + rows.start..first + rows.end, keys, ..span.clone() }
        })
    }

    /// Maximum number of elements per row of a block with this many positions: scores, elements of a query, or dropout
    /// factors for all positions.
    fn row_len(&self, positions: usize) -> usize {
        let factors = if self.dropout.is_some() { self.dims.seq } else { 0 };
        positions.max(self.dims.head_dim).max(factors)
    }

    /// The rows of a block's queries in the arithmetic type, with those of a group stacked: (samples, groups, rows,
    /// elements).
    fn queries(&self, block: &Block, tensor: &Tensor) -> Result<Tensor, Failure> {
        let rows = part(&block.of_heads(tensor, self.group_size())?, 2, &block.rows)?;
        let by_group = [block.groups.len(), self.group_size()].map(int);
        Ok(rows.f_to_kind(arithmetic(&rows)?)?.f_unflatten(1, by_group)?.f_flatten(2, 3)?)
    }

    /// The keys or values that a block reads, in the arithmetic type: (samples, groups, positions, elements).
    fn keys(&self, block: &Block, tensor: &Tensor) -> Result<Tensor, Failure> {
        let seen = part(&block.of_heads(tensor, 1)?, 2, &block.keys)?;
        Ok(seen.f_to_kind(arithmetic(&seen)?)?)
    }

    /// Writes the rows of a block to their place: the inverse of [`Composed::queries`].
    fn write(&self, block: &Block, rows: &Tensor, tensor: &Tensor) -> Result<(), Failure> {
        let mut to = part(&block.of_heads(tensor, self.group_size())?, 2, &block.rows)?;
        to.f_copy_(&rows.f_view_as(&to)?)?;
        Ok(())
    }

    /// The dropout factors for the probabilities of a block: from the memory's kernel if it has one, from the host
    /// otherwise. The rows of a head are consecutive elements of its sample.
    fn factors(&self, block: &Block, kind: Kind) -> Result<Option<Factors<D::Buffer>>, Failure> {
        let Some(dropout) = self.dropout else { return Ok(None) };
        let (seq, group_size) = (self.dims.seq, self.group_size());
        let heads = block.groups.start * group_size..block.groups.end * group_size;
        let keys = &dropout.keys[block.samples.clone()];
        let run_keys: Vec<u64> = keys.iter().flat_map(|&key| heads.clone().map(move |_| key)).collect();
        let first = |head: usize| ((head * seq + block.rows.start) * seq) as u64;
        let firsts: Vec<u64> = keys.iter().flat_map(|_| heads.clone().map(first)).collect();
        let runs = Dropout { keys: &run_keys, ..dropout };
        let run_len = block.rows.len() * seq;
        let dtype = if kind == Kind::Double { DType::F64 } else { DType::F32 };
        if let Some(buffer) = self.torch.dropout_factors(runs, &firsts, dtype, run_len)? {
            return Ok(Some(Factors::InMemory(buffer)));
        }
        let host_factors = factors(runs, &firsts, run_len)?.f_to_kind(kind)?;
        Ok(Some(Factors::FromHost(host_factors.f_to_device(self.torch.storage().device())?)))
    }
}

impl Block {
    /// The samples and heads of a block, in a tensor that has `group_size` heads per key head.
    fn of_heads(&self, tensor: &Tensor, group_size: usize) -> Result<Tensor, Failure> {
        let heads = self.groups.start * group_size..self.groups.end * group_size;
        part(&part(tensor, 0, &self.samples)?, 1, &heads)
    }

    /// Its keys, as positions within those of a span.
    fn keys_in(&self, span: &Block) -> Range<usize> {
        self.keys.start - span.keys.start..self.keys.end - span.keys.start
    }

    /// Number of query heads, over all its samples.
    fn heads_len(&self, group_size: usize) -> usize {
        self.samples.len() * self.groups.len() * group_size
    }
}

/// Dropout factors for all keys of every row of a block.
enum Factors<B> {
    /// In a buffer of the memory.
    InMemory(B),
    /// Created on the host, in libtorch's memory.
    FromHost(Tensor),
}

impl<B: fsdp_core::memory::Buffer> Factors<B> {
    /// Multiplies `values`, which cover the keys that a block reads.
    fn multiply<D: TorchStorage<Buffer = B>>(
        &self,
        call: &Composed<'_, D>,
        block: &Block,
        values: &mut Tensor,
    ) -> Result<(), Failure> {
        let rows = call.group_size() * block.rows.len();
        let sizes = [block.samples.len(), block.groups.len(), rows, call.dims.seq].map(int);
        let factors = match self {
            Factors::InMemory(buffer) => {
                part(&*call.torch.view(Slice::whole(buffer), &sizes)?, 3, &block.keys)?
            }
            Factors::FromHost(all) => part(&all.f_view(sizes)?, 3, &block.keys)?,
        };
        values.f_mul_(&factors).done()?;
        Ok(())
    }
}
