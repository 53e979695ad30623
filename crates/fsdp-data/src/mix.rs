//! Mixes several sources in fixed proportions: determines the source and the sample at each position of a run.
//!
//! Samples are numbered from 0 over the whole run, step after step. A cycle of [`SLOTS`] numbers gives each source
//! slots in proportion to its weight and spreads them evenly, so that every global batch has about the same
//! proportions. The n-th number of a source is its n-th sample, epoch after epoch: each source has its own permutation,
//! and an exhausted source starts its next epoch independently of the others. All of this depends only on the number,
//! so it is the same for every world size and after every restart.

use super::error::DataError;
use super::permutation::Permutation;

/// The period of the order of sources; the smallest possible share is one slot.
pub(super) const SLOTS: usize = 1 << 16;

/// Determines which source each sample of a run comes from.
#[derive(Clone, Debug)]
pub(super) struct Mix {
    /// For each slot of the cycle, its source, and the number of earlier slots of the same source.
    slots: Vec<(u32, u32)>,
    /// Slots per cycle of each source.
    shares: Vec<usize>,
}

impl Mix {
    /// Creates a mix of sources with these weights, which are relative.
    ///
    /// # Errors
    /// [`DataError::Share`] for a source whose share is less than one slot.
    ///
    /// # Panics
    /// If there is no source, or a weight is not a finite number above 0, which a configuration rules out.
    pub(super) fn new(weights: &[f64]) -> Result<Mix, DataError> {
        assert!(weights.iter().all(|weight| weight.is_finite() && *weight > 0.0), "weights are positive");
        let shares = shares(weights);
        if let Some(index) = shares.iter().position(|&share| share == 0) {
            return Err(DataError::Share { index, slots: SLOTS });
        }
        let mut order: Vec<(u32, u32)> = Vec::with_capacity(SLOTS);
        for (source, &share) in (0..).zip(&shares) {
            order.extend((0..share as u32).map(|index| (source, index)));
        }
        // Use number i of a source is due in the middle of the i-th part of the cycle: at (2i + 1) / (2 share).
        let due = |&(source, index): &(u32, u32)| (2 * u64::from(index) + 1, shares[source as usize] as u64);
        order.sort_by(|first, second| {
            let ((a, share_a), (b, share_b)) = (due(first), due(second));
            (a * share_b).cmp(&(b * share_a)).then(first.0.cmp(&second.0))
        });
        Ok(Mix { slots: order, shares })
    }

    /// Returns the share of a source, as a fraction of 1.
    #[expect(clippy::cast_precision_loss, reason = "at most 65536")]
    pub(super) fn share(&self, source: usize) -> f64 {
        self.shares[source] as f64 / SLOTS as f64
    }

    /// Returns the source of a sample of the run, and the number of earlier samples of this source.
    pub(super) fn at(&self, number: u64) -> (usize, u64) {
        let (cycle, slot) = (number / SLOTS as u64, (number % SLOTS as u64) as usize);
        let (source, index) = self.slots[slot];
        let source = source as usize;
        (source, cycle * self.shares[source] as u64 + u64::from(index))
    }

    /// Returns how many of the first `count` samples of a run come from a source.
    pub(super) fn taken(&self, source: usize, count: u64) -> u64 {
        let (cycles, rest) = (count / SLOTS as u64, (count % SLOTS as u64) as usize);
        let in_rest =
            self.slots[..rest].iter().filter(|(slot_source, _)| *slot_source as usize == source).count();
        cycles * self.shares[source] as u64 + in_rest as u64
    }
}

/// Distributes slots in proportion to weights, by the largest remainder method.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "of numbers from 0 to 65536"
)]
fn shares(weights: &[f64]) -> Vec<usize> {
    // Weights are divided by the largest, so that their sum cannot overflow.
    let largest = weights.iter().copied().fold(0.0, f64::max);
    let total: f64 = weights.iter().map(|weight| weight / largest).sum();
    let exact: Vec<f64> = weights.iter().map(|weight| weight / largest / total * SLOTS as f64).collect();
    let mut shares: Vec<usize> = exact.iter().map(|share| share.floor() as usize).collect();
    let mut by_remainder: Vec<usize> = (0..shares.len()).collect();
    by_remainder.sort_by(|&a, &b| (exact[b] - exact[b].floor()).total_cmp(&(exact[a] - exact[a].floor())));
    let remaining = SLOTS.saturating_sub(shares.iter().sum());
    by_remainder.iter().cycle().take(remaining).for_each(|&source| shares[source] += 1);
    shares
}

/// Cuts a mix into global batches and micro-batches.
#[derive(Clone, Debug)]
pub(super) struct MixSampler {
    mix: Mix,
    /// Number of samples of each source.
    samples: Vec<usize>,
    global_batch: usize,
    micro_batch: usize,
    shuffle_seed: Option<u64>,
}

impl MixSampler {
    /// Creates a sampler over sources with these numbers of samples and the weights of `mix`.
    ///
    /// # Panics
    /// If a source is empty, or the micro-batch size does not divide the global batch size, which a resolved
    /// configuration rules out.
    pub(super) fn new(
        mix: Mix,
        samples: Vec<usize>,
        global_batch: usize,
        micro_batch: usize,
        shuffle_seed: Option<u64>,
    ) -> MixSampler {
        assert!(
            samples.iter().all(|&count| count > 0) && samples.len() == mix.shares.len(),
            "sources have samples"
        );
        assert!(global_batch > 0 && global_batch.is_multiple_of(micro_batch), "V is a whole number");
        MixSampler { mix, samples, global_batch, micro_batch, shuffle_seed }
    }

    /// Returns the mix.
    pub(super) fn mix(&self) -> &Mix {
        &self.mix
    }

    /// Micro-batches per step, V.
    pub(super) fn micro_batches(&self) -> usize {
        self.global_batch / self.micro_batch
    }

    /// The seed of the permutations; `None` if samples are not shuffled.
    pub(super) fn shuffle_seed(&self) -> Option<u64> {
        self.shuffle_seed
    }

    /// Returns the position of a source before a step (from 0): its epoch, and the number of samples taken in that
    /// epoch.
    pub(super) fn position(&self, source: usize, step: u64) -> (u64, u64) {
        let taken = self.mix.taken(source, step * self.global_batch as u64);
        let samples = self.samples[source] as u64;
        (taken / samples, taken % samples)
    }

    /// Returns the samples of a micro-batch of a step, both counted from 0: their sources, and their indices in the
    /// sources.
    ///
    /// # Panics
    /// If the step has no such micro-batch.
    pub(super) fn batch(&self, step: u64, micro_batch: usize) -> Vec<(usize, usize)> {
        assert!(micro_batch < self.micro_batches(), "micro-batch {micro_batch} of {}", self.micro_batches());
        let start = step * self.global_batch as u64 + (micro_batch * self.micro_batch) as u64;
        (start..start + self.micro_batch as u64).map(|number| self.sample(number)).collect()
    }

    fn sample(&self, number: u64) -> (usize, usize) {
        let (source, taken) = self.mix.at(number);
        let samples = self.samples[source];
        let (epoch, position) = (taken / samples as u64, (taken % samples as u64) as usize);
        let index = match self.shuffle_seed {
            None => position,
            // Sources of equal length get different permutations.
            Some(seed) => Permutation::new(samples, seed.wrapping_add(source as u64), epoch).at(position),
        };
        (source, index)
    }
}

#[cfg(test)]
mod tests;
