//! The micro-batch that a tape works on.

use fsdp_core::memory::Slice;
use fsdp_core::model::BlockId;

use crate::random;

/// A micro-batch: rows are ordered by (sample, position).
#[derive(Debug)]
pub struct MicroBatch<'a, B> {
    /// Number of samples.
    pub batch: usize,
    /// Tokens per sample.
    pub seq: usize,
    /// Token ids, one per row.
    pub ids: Slice<'a, B>,
    /// Global ids of the samples.
    pub samples: &'a [u64],
    /// Seed of the run, for dropout.
    pub seed: u64,
    /// Optimizer step, for dropout.
    pub step: u64,
    /// Whether dropout acts.
    pub training: bool,
}

impl<B> MicroBatch<'_, B> {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.batch * self.seq
    }

    /// The keys of the dropout masks of one site, the `ordinal`th of a block, one per sample.
    pub fn dropout_keys(&self, block: BlockId, ordinal: u64) -> Vec<u64> {
        let key = |&sample| random::key(&[self.seed, self.step, sample, block.0 as u64, ordinal]);
        self.samples.iter().map(key).collect()
    }
}
