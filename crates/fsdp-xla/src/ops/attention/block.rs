//! Attention blocks: how many samples and queries have their scores in memory at a time.

use fsdp_nn::op::{AttentionDims, Scores};

use super::Heads;
use crate::hlo::{Element, Value};
use crate::trace::Trace;

/// The samples and queries whose scores are computed together.
pub(super) struct Block {
    pub(super) samples: usize,
    pub(super) queries: usize,
    /// The first sample and the first query; `None` if the block is the whole batch.
    pub(super) at: Option<[Value; 2]>,
}

/// Number of blocks along the samples, and along the queries of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Division {
    samples: usize,
    queries: usize,
}

impl Division {
    /// The fewest equal blocks of at most `bytes_max` bytes of scores. Samples are divided first; queries only if a
    /// single sample is too large.
    pub(super) fn new(dims: AttentionDims, scores: Scores, element: Element, bytes_max: usize) -> Self {
        let AttentionDims { batch, seq, heads, .. } = dims;
        let sample = heads * seq * seq * element.byte_len();
        let samples = parts(batch, sample * batch, bytes_max, |_| true).unwrap_or(batch);
        if samples < batch {
            return Self { samples, queries: 1 };
        }
        // The generator produces four numbers at a time, so a block of queries must begin with the first of four.
        let is_aligned = |queries| scores.dropout == 0.0 || (queries * seq % 4 == 0 && seq % 2 == 0);
        Self { samples, queries: parts(seq, sample, bytes_max, is_aligned).unwrap_or(1) }
    }

    /// Number of blocks.
    pub(super) fn blocks(self) -> usize {
        self.samples * self.queries
    }

    /// Returns the block with this number.
    pub(super) fn block(self, trace: &mut Trace, dims: AttentionDims, number: &Value) -> Block {
        let (samples, queries) = (dims.batch / self.samples, dims.seq / self.queries);
        let hlo = &mut trace.hlo;
        let (sample, query) = (
            hlo.with_int("divide", number, self.queries as i64),
            hlo.with_int("remainder", number, self.queries as i64),
        );
        let at = [
            hlo.with_int("multiply", &sample, samples as i64),
            hlo.with_int("multiply", &query, queries as i64),
        ];
        Block { samples, queries, at: Some(at) }
    }
}

/// Number of equal parts of `count` items such that each part has at most `bytes_max` bytes. If the least number does
/// not divide evenly, up to four times as many are tried. `None` if none does, as for a sequence of prime length.
fn parts(count: usize, bytes: usize, bytes_max: usize, is_allowed: impl Fn(usize) -> bool) -> Option<usize> {
    let min_parts = bytes.div_ceil(bytes_max).clamp(1, count);
    (min_parts..=count.min(4 * min_parts))
        .find(|&parts| count.is_multiple_of(parts) && is_allowed(count / parts))
}

impl Block {
    /// The whole batch as one block.
    pub(super) fn whole(dims: AttentionDims) -> Self {
        Self { samples: dims.batch, queries: dims.seq, at: None }
    }

    /// The block's queries, keys and values.
    pub(super) fn heads_of(&self, trace: &mut Trace, all: &Heads) -> Heads {
        Heads {
            queries: self.queries_of(trace, &all.queries),
            keys: self.samples_of(trace, &all.keys),
            values: self.samples_of(trace, &all.values),
        }
    }

    /// The block's samples of a value whose first dimension is samples.
    pub(super) fn samples_of(&self, trace: &mut Trace, x: &Value) -> Value {
        let Some([sample, _]) = &self.at else { return x.clone() };
        let mut sizes = x.dims().to_vec();
        sizes[0] = self.samples;
        trace.hlo.dynamic_slice(x, &[(0, sample)], &sizes)
    }

    /// The block's samples and queries of a value with samples as first and queries as fourth dimension.
    pub(super) fn queries_of(&self, trace: &mut Trace, x: &Value) -> Value {
        let Some([sample, query]) = &self.at else { return x.clone() };
        let mut sizes = x.dims().to_vec();
        (sizes[0], sizes[3]) = (self.samples, self.queries);
        trace.hlo.dynamic_slice(x, &[(0, sample), (3, query)], &sizes)
    }

    /// Writes samples and queries to where [`Block::queries_of`] reads them.
    pub(super) fn put_queries(&self, trace: &mut Trace, all: &Value, part: &Value) -> Value {
        match &self.at {
            None => part.clone(),
            Some([sample, query]) => trace.hlo.dynamic_update(all, part, &[(0, sample), (3, query)]),
        }
    }

    /// Adds to the samples that [`Block::samples_of`] reads.
    pub(super) fn add_samples(&self, trace: &mut Trace, all: &Value, part: &Value) -> Value {
        let Some([sample, _]) = &self.at else { return part.clone() };
        let old = self.samples_of(trace, all);
        let sum = trace.hlo.add(&old, part);
        trace.hlo.dynamic_update(all, &sum, &[(0, sample)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Samples and queries per block, for `batch` samples of `seq` positions, with 6 heads of `f64`.
    fn block(batch: usize, seq: usize, bytes_max: usize, dropout: f64) -> [usize; 2] {
        let dims = AttentionDims { batch, seq, heads: 6, kv_heads: 2, head_dim: 4 };
        let division = Division::new(dims, Scores::dropping(dropout), Element::F64, bytes_max);
        [batch / division.samples, seq / division.queries]
    }

    #[test]
    fn block_scores_stay_within_byte_limit() {
        let sample = 6 * 150 * 150 * 8;
        assert_eq!(block(4, 150, 4 * sample, 0.0), [4, 150]);
        assert_eq!(block(4, 150, 4 * sample - 1, 0.0), [2, 150]);
        assert_eq!(block(5, 150, 4 * sample, 0.0), [1, 150]);
        assert_eq!(block(4, 150, sample, 0.0), [1, 150]);
        assert_eq!(block(4, 150, sample - 1, 0.0), [1, 75]);
        assert_eq!(block(4, 150, 1, 0.0), [1, 1]);
    }

    #[test]
    fn dropout_blocks_align_to_four_random_numbers() {
        // 75 queries of 150 keys have 11,250 numbers, not a multiple of four.
        assert_eq!(block(1, 150, 6 * 150 * 150 * 8 - 1, 0.5), [1, 50]);
        assert_eq!(block(1, 153, 6 * 153 * 153 * 8 - 1, 0.5), [1, 153]);
    }

    #[test]
    fn sequence_without_equal_parts_is_not_split() {
        assert_eq!(block(2, 67, 6 * 67 * 67 * 8 - 1, 0.0), [1, 67]);
    }
}
