//! The tables of a micro-batch, which calls access beside values and parameters.

use std::ops::Range;

use fsdp_core::memory::Slice;
use fsdp_core::model::BlockId;

use crate::random;

/// A micro-batch. Rows are ordered by (chunk, sample, position); facts are those of whole samples.
#[derive(Debug)]
pub(crate) struct MicroBatch<'a, B> {
    /// Number of chunks that the rows belong to.
    pub(crate) chunks: usize,
    /// The first of these chunks, where samples are cut.
    pub(crate) first_chunk: Option<usize>,
    /// Token ids, one per row.
    pub(crate) ids: Slice<'a, B>,
    /// The token to predict at each row.
    pub(crate) targets: Slice<'a, B>,
    /// The position of each row within its document, if samples are packed.
    pub(crate) positions: Option<Slice<'a, B>>,
    /// The rows of each document, if samples are packed.
    pub(crate) documents: &'a [Range<usize>],
    /// Number of counted targets in all chunks.
    pub(crate) counted: u64,
    /// Number of rows up to the last counted target of their sample, in all chunks.
    pub(crate) counted_rows: usize,
    /// By chunk and sample, the number of these rows.
    pub(crate) lengths: &'a [usize],
    /// Per sample, where the keys end that any of its queries sees; empty if a query sees all keys up to its own.
    pub(crate) keys_ends: &'a [usize],
    /// Global ids of the samples.
    pub(crate) samples: &'a [u64],
    /// Seed of the run, for dropout.
    pub(crate) seed: u64,
    /// Optimizer step, for dropout.
    pub(crate) step: u64,
}

impl<B> MicroBatch<'_, B> {
    /// Returns the dropout keys of the `ordinal`th site of a block, one per sample. Every chunk of a cut sample has a mask,
    /// which the rank that computes it does not change.
    pub(crate) fn dropout_keys(&self, block: BlockId, ordinal: u64, chunk: usize) -> Vec<u64> {
        let key = |&sample| {
            let parts = [self.seed, self.step, sample, block.0 as u64, ordinal];
            match self.first_chunk {
                None => random::key(&parts),
                Some(first) => random::key(&[&parts[..], &[(first + chunk) as u64]].concat()),
            }
        };
        self.samples.iter().map(key).collect()
    }
}
