//! The tables of a micro-batch, which calls read and write beside values and parameters.

use std::ops::Range;

use fsdp_core::memory::Slice;
use fsdp_core::model::BlockId;

use crate::random;

/// A micro-batch: rows are ordered by (sample, position).
#[derive(Debug)]
pub(crate) struct MicroBatch<'a, B> {
    /// Token ids, one per row.
    pub(crate) ids: Slice<'a, B>,
    /// The token to predict at each row.
    pub(crate) targets: Slice<'a, B>,
    /// The position of each row within its document, where samples hold several.
    pub(crate) positions: Option<Slice<'a, B>>,
    /// The rows of each document, where samples hold several.
    pub(crate) documents: &'a [Range<usize>],
    /// Targets that count.
    pub(crate) counted: u64,
    /// Of each sample the rows up to its last counted target.
    pub(crate) lengths: &'a [usize],
    /// Global ids of the samples.
    pub(crate) samples: &'a [u64],
    /// Seed of the run, for dropout.
    pub(crate) seed: u64,
    /// Optimizer step, for dropout.
    pub(crate) step: u64,
}

impl<B> MicroBatch<'_, B> {
    /// The keys of the dropout masks of one site, the `ordinal`th of a block, one per sample.
    pub(crate) fn dropout_keys(&self, block: BlockId, ordinal: u64) -> Vec<u64> {
        let key = |&sample| random::key(&[self.seed, self.step, sample, block.0 as u64, ordinal]);
        self.samples.iter().map(key).collect()
    }
}
