//! Several sources in fixed shares: which sample of which source stands where.
//!
//! Samples are numbered from 0 over the whole run, step after step. A cycle of [`SLOTS`] numbers gives each source as many
//! slots as its weight says, and spreads them evenly, so that every global batch holds about the shares of the whole. The
//! n-th number that belongs to a source is its n-th sample, epoch after epoch: each has a permutation of its own, and a
//! source that is exhausted begins its next epoch, whatever the others do. All of this is a function of the number, so no
//! world and no restart changes it.

use super::error::DataError;
use super::permutation::Permutation;

/// Numbers after which the order of sources repeats, so the smallest share is one of them.
pub(super) const SLOTS: usize = 1 << 16;

/// Which source each sample of a run comes from.
#[derive(Clone, Debug)]
pub(super) struct Mix {
    /// For each number of a cycle, its source, and how many numbers of this source stand before it in the cycle.
    slots: Vec<(u32, u32)>,
    /// How many numbers of a cycle each source has.
    shares: Vec<usize>,
}

impl Mix {
    /// Sources with these weights, in proportion.
    ///
    /// # Errors
    /// [`DataError::Share`] for a source whose share is less than a slot.
    ///
    /// # Panics
    /// If there is none, or a weight is not a finite number above 0, which a configuration excludes.
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
            let ((a, of_a), (b, of_b)) = (due(first), due(second));
            (a * of_b).cmp(&(b * of_a)).then(first.0.cmp(&second.0))
        });
        Ok(Mix { slots: order, shares })
    }

    /// The share of a source, of 1.
    #[expect(clippy::cast_precision_loss, reason = "at most 65536")]
    pub(super) fn share(&self, source: usize) -> f64 {
        self.shares[source] as f64 / SLOTS as f64
    }

    /// The source of a sample of the run, and how many samples of this source stand before it.
    pub(super) fn at(&self, number: u64) -> (usize, u64) {
        let (cycle, slot) = (number / SLOTS as u64, (number % SLOTS as u64) as usize);
        let (source, index) = self.slots[slot];
        let source = source as usize;
        (source, cycle * self.shares[source] as u64 + u64::from(index))
    }

    /// How many of the first `count` samples of a run come from a source.
    pub(super) fn taken(&self, source: usize, count: u64) -> u64 {
        let (cycles, rest) = (count / SLOTS as u64, (count % SLOTS as u64) as usize);
        let in_rest = self.slots[..rest].iter().filter(|(of, _)| *of as usize == source).count();
        cycles * self.shares[source] as u64 + in_rest as u64
    }
}

/// Slots in proportion to weights, by the largest remainders.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "of numbers from 0 to 65536"
)]
fn shares(weights: &[f64]) -> Vec<usize> {
    // Weights may be of any size: no sum of them overflows.
    let largest = weights.iter().copied().fold(0.0, f64::max);
    let total: f64 = weights.iter().map(|weight| weight / largest).sum();
    let exact: Vec<f64> = weights.iter().map(|weight| weight / largest / total * SLOTS as f64).collect();
    let mut shares: Vec<usize> = exact.iter().map(|share| share.floor() as usize).collect();
    let mut by_remainder: Vec<usize> = (0..shares.len()).collect();
    by_remainder.sort_by(|&a, &b| (exact[b] - exact[b].floor()).total_cmp(&(exact[a] - exact[a].floor())));
    let left = SLOTS.saturating_sub(shares.iter().sum());
    by_remainder.iter().cycle().take(left).for_each(|&source| shares[source] += 1);
    shares
}

/// Cuts a mix into global batches and these into micro-batches.
#[derive(Clone, Debug)]
pub(super) struct MixSampler {
    mix: Mix,
    /// Samples of each source.
    samples: Vec<usize>,
    global_batch: usize,
    micro_batch: usize,
    shuffle_seed: Option<u64>,
}

impl MixSampler {
    /// A sampler over sources with these many samples and the weights of `mix`.
    ///
    /// # Panics
    /// If a source is empty, or the micro-batch size does not divide the global one, which a resolved configuration
    /// excludes.
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

    /// The shares.
    pub(super) fn mix(&self) -> &Mix {
        &self.mix
    }

    /// Micro-batches per step, V.
    pub(super) fn micro_batches(&self) -> usize {
        self.global_batch / self.micro_batch
    }

    /// The seed of the permutations, if samples are shuffled.
    pub(super) fn shuffle_seed(&self) -> Option<u64> {
        self.shuffle_seed
    }

    /// Where a source is before a step (from 0): its epoch, and how many samples of that are taken.
    pub(super) fn position(&self, source: usize, step: u64) -> (u64, u64) {
        let taken = self.mix.taken(source, step * self.global_batch as u64);
        let samples = self.samples[source] as u64;
        (taken / samples, taken % samples)
    }

    /// The samples of a micro-batch of a step, both from 0: their sources, and their indices in these.
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
            // Sources of equal length do not go the same way.
            Some(seed) => Permutation::new(samples, seed.wrapping_add(source as u64), epoch).at(position),
        };
        (source, index)
    }
}

#[cfg(test)]
mod tests;
