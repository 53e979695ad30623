//! Assigns samples to the micro-batches of training steps.

use super::error::DataError;
use super::permutation::Permutation;
use super::role::Role;

/// Cuts epochs into global batches and these into micro-batches.
///
/// Without a shuffle seed, step s (from 0) of an epoch takes samples s·G to s·G + G - 1, and its micro-batch j takes
/// samples from s·G + j·m. With a shuffle seed, it takes the same positions of a permutation that differs in every
/// epoch. The incomplete last global batch of an epoch is dropped. Nothing depends on the world size.
#[derive(Clone, Debug)]
pub(super) struct Sampler {
    samples: usize,
    global_batch: usize,
    micro_batch: usize,
    shuffle_seed: Option<u64>,
}

impl Sampler {
    /// Creates a sampler over `samples` samples (of `seq_len` tokens, which is only used in errors).
    ///
    /// # Errors
    /// [`DataError::TooShort`] if there is less than one global batch.
    ///
    /// # Panics
    /// If the micro-batch size does not divide the global batch size, which a resolved configuration rules out.
    pub(super) fn new(
        samples: usize,
        seq_len: usize,
        global_batch: usize,
        micro_batch: usize,
        shuffle_seed: Option<u64>,
    ) -> Result<Sampler, DataError> {
        assert!(global_batch > 0 && global_batch.is_multiple_of(micro_batch), "V is a whole number");
        Role::Training { global_batch }.expect(samples, seq_len)?;
        Ok(Sampler { samples, global_batch, micro_batch, shuffle_seed })
    }

    /// Steps per epoch.
    pub(super) fn steps_per_epoch(&self) -> u64 {
        (self.samples / self.global_batch) as u64
    }

    /// Micro-batches per step, V.
    pub(super) fn micro_batches(&self) -> usize {
        self.global_batch / self.micro_batch
    }

    /// The seed of the permutations; `None` if samples are not shuffled.
    pub(super) fn shuffle_seed(&self) -> Option<u64> {
        self.shuffle_seed
    }

    /// Returns the epoch of a step, both counted from 0.
    pub(super) fn epoch(&self, step: u64) -> u64 {
        step / self.steps_per_epoch()
    }

    /// Returns the samples of a micro-batch of a step, both counted from 0.
    ///
    /// # Panics
    /// If the step has no such micro-batch.
    pub(super) fn batch(&self, step: u64, micro_batch: usize) -> Vec<usize> {
        assert!(micro_batch < self.micro_batches(), "micro-batch {micro_batch} of {}", self.micro_batches());
        let in_epoch = usize::try_from(step % self.steps_per_epoch()).expect("an epoch fits in memory");
        let start = in_epoch * self.global_batch + micro_batch * self.micro_batch;
        let positions = start..start + self.micro_batch;
        match self.shuffle_seed {
            None => positions.collect(),
            Some(seed) => {
                let permutation = Permutation::new(self.samples, seed, self.epoch(step));
                positions.map(|position| permutation.at(position)).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests;
