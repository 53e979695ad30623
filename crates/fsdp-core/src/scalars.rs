//! The scalars of a step: loss, target count, gradient norm, stop flag, and whether parameters and optimizer state are
//! finite, as words of one integer buffer.
//!
//! They stay on the device. Losses and norms are added to the words, and one integer all-reduce sums them over all
//! ranks, so the result does not depend on the number or order of ranks. [`GradientFactors`], which the update needs,
//! are computed where the update runs. The host may read the scalars at any time.

use std::ops::Range;

use crate::exact::ExactSum;

/// Words of the buffer: exact sums of loss and squared norm, the target count, the number of ranks that ask to stop,
/// and the number of ranks whose parameters or state are not finite.
pub const SCALAR_WORDS: usize = 2 * ExactSum::WORDS + 3;

/// Words of the summed loss.
pub const LOSS: Range<usize> = 0..ExactSum::WORDS;

/// Words of the squared norm of the reduced, unscaled gradient.
pub const SQUARED_NORM: Range<usize> = ExactSum::WORDS..2 * ExactSum::WORDS;

/// The word of the target count; the word after it counts the ranks that ask to stop.
pub const COUNT: usize = 2 * ExactSum::WORDS;

/// The word that counts the ranks on which an earlier update wrote a value that is not finite.
pub const NOT_FINITE: usize = COUNT + 2;

/// Added to the norm before dividing, as in PyTorch's `clip_grad_norm_`.
pub const CLIP_EPSILON: f64 = 1e-6;

/// The sums and counts that a model collects besides its loss, over the micro-batches and ranks of a step. Their words
/// follow the [`SCALAR_WORDS`]: first the exact sums, then one word per count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tallies {
    /// Number of exact sums.
    pub sums: usize,
    /// Number of counts.
    pub counts: usize,
}

impl Tallies {
    /// Number of words for the sums and counts.
    pub fn words(self) -> usize {
        self.sums * ExactSum::WORDS + self.counts
    }

    /// Number of words for all scalars of a step.
    pub fn scalar_words(self) -> usize {
        SCALAR_WORDS + self.words()
    }

    /// The range of one sum in the words of all scalars.
    pub fn sum(self, index: usize) -> Range<usize> {
        assert!(index < self.sums, "a model counts what it has declared");
        let start = SCALAR_WORDS + index * ExactSum::WORDS;
        start..start + ExactSum::WORDS
    }

    /// The range of all counts in the words of all scalars.
    pub fn counts(self) -> Range<usize> {
        SCALAR_WORDS + self.sums * ExactSum::WORDS..self.scalar_words()
    }

    /// Reads the sums, as numbers, and the counts from the words of all scalars of a step.
    fn read(self, words: &[i64]) -> (Vec<f64>, Vec<u64>) {
        assert_eq!(words.len(), self.scalar_words(), "a step has the scalars that its model declares");
        let sum = |index| ExactSum::from_words(&words[self.sum(index)]).value();
        let count = |&count: &i64| count.cast_unsigned();
        ((0..self.sums).map(sum).collect(), words[self.counts()].iter().map(count).collect())
    }
}

/// The results of a step, the same on every rank, bit for bit.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// Mean loss over all counted targets of the global batch, before the update.
    pub loss: f64,
    /// Number of counted targets.
    pub targets: u64,
    /// L2 norm of the gradient of the mean loss, before clipping (0 in evaluation).
    pub grad_norm: f64,
    /// Whether the loss, the norm, and the parameters and optimizer state before the update are finite. If not,
    /// parameters and state are not updated in this step or any later one; with loss scaling, only this step skips the
    /// update.
    pub finite: bool,
    /// Whether parameters and state are finite. The first report in which they are not belongs to the step after the
    /// one that wrote such a value.
    pub state_finite: bool,
    /// Whether any rank asked to stop.
    pub stop: bool,
    /// The sums that the model declares ([`Tallies`]).
    pub sums: Vec<f64>,
    /// The counts that the model declares.
    pub counts: Vec<u64>,
}

impl StepReport {
    /// Reads the words after they were summed over all ranks. Their squared norm is of the gradient of the summed loss
    /// divided by `divisor`. The divisor is the number of ranks if gradients are averaged over ranks, or 1 if they are
    /// summed, divided by the loss scale, because the gradient of a scaled loss is *multiplied* by that scale.
    ///
    /// # Panics
    /// When there are not [`SCALAR_WORDS`] words.
    pub fn of(words: &[i64], divisor: f64) -> Self {
        assert_eq!(words.len(), SCALAR_WORDS, "the scalars of a step have a fixed number of words");
        let targets = words[COUNT] as u64;
        let loss = ExactSum::from_words(&words[LOSS]).value() * scale(targets, 1.0);
        let norm = ExactSum::from_words(&words[SQUARED_NORM]).value().sqrt() * scale(targets, divisor);
        let state_finite = words[NOT_FINITE] == 0;
        let finite = loss.is_finite() && norm.is_finite() && state_finite;
        let stop = words[COUNT + 1] > 0;
        let (sums, counts) = (Vec::new(), Vec::new());
        Self { loss, targets, grad_norm: norm, finite, state_finite, stop, sums, counts }
    }

    /// As [`StepReport::of`], with the sums and counts of the model, from the words of all scalars.
    ///
    /// # Panics
    /// When the number of words is not [`Tallies::scalar_words`].
    pub fn with(words: &[i64], tallies: Tallies, divisor: f64) -> Self {
        let (sums, counts) = tallies.read(words);
        Self { sums, counts, ..Self::of(&words[..SCALAR_WORDS], divisor) }
    }
}

/// The factor from a sum over targets that was divided by `divisor` to the mean over targets. If `divisor` is a power
/// of two, it is exactly `divisor` times the factor for `divisor` 1.
fn scale(targets: u64, divisor: f64) -> f64 {
    if targets == 0 { 0.0 } else { divisor / targets as f64 }
}

/// The step scalars that an update needs. On the device they are [`GradientFactors::LEN`] numbers in the order of the
/// fields, the last one 1 or 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradientFactors {
    /// `divisor` / number of targets, with the divisor of [`StepReport::of`]; turns the reduced gradient into the
    /// gradient of the mean loss.
    pub scale: f64,
    /// Clipping coefficient, at most 1, applied after `scale`.
    pub clip: f64,
    /// Whether loss, norm, parameters and state were finite in this step and all earlier ones.
    pub finite: bool,
}

impl GradientFactors {
    /// Number of values on the device.
    pub const LEN: usize = 3;

    /// The values before the first step, with `finite` set.
    pub const START: [f64; Self::LEN] = [0.0, 1.0, 1.0];

    /// Computes the factors of a step from its words; words and `divisor` are as in [`StepReport::of`]. `was_finite` is
    /// the `finite` flag of the previous step.
    pub fn of(words: &[i64], divisor: f64, grad_clip: Option<f64>, was_finite: bool) -> Self {
        let StepReport { targets, grad_norm, finite, .. } = StepReport::of(words, divisor);
        let clip = grad_clip.map_or(1.0, |max| (max / (grad_norm + CLIP_EPSILON)).min(1.0));
        Self { scale: scale(targets, divisor), clip, finite: was_finite && finite }
    }

    /// Returns the values in device order.
    pub fn to_array(self) -> [f64; Self::LEN] {
        [self.scale, self.clip, f64::from(u8::from(self.finite))]
    }

    /// Restores the factors from their values in device order.
    pub fn from_array([scale, clip, finite]: [f64; Self::LEN]) -> Self {
        Self { scale, clip, finite: finite != 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(losses: &[f64], squares: &[f64], count: i64) -> Vec<i64> {
        let mut words = vec![0; SCALAR_WORDS];
        for (range, values) in [(LOSS, losses), (SQUARED_NORM, squares)] {
            let mut sum = ExactSum::default();
            values.iter().for_each(|&value| sum.add(value));
            words[range].copy_from_slice(&sum.to_words());
        }
        words[COUNT] = count;
        words
    }

    const FOUND: StepReport = StepReport {
        loss: 2.0,
        targets: 4,
        grad_norm: 1.25,
        finite: true,
        state_finite: true,
        stop: false,
        sums: Vec::new(),
        counts: Vec::new(),
    };

    #[test]
    fn model_tallies_follow_scalars_and_leave_them_unchanged() {
        let tallies = Tallies { sums: 2, counts: 3 };
        let mut all = vec![0; tallies.scalar_words()];
        all[..SCALAR_WORDS].copy_from_slice(&words(&[3.0, 5.0], &[9.0, 16.0], 4));
        for (index, values) in [[0.1, 0.2], [1e300, -1e-300]].iter().enumerate() {
            let mut sum = ExactSum::default();
            values.iter().for_each(|&value| sum.add(value));
            all[tallies.sum(index)].copy_from_slice(&sum.to_words());
        }
        all[tallies.counts()].copy_from_slice(&[7, 0, 1 << 40]);
        let found = StepReport { sums: vec![0.1 + 0.2, 1e300], counts: vec![7, 0, 1 << 40], ..FOUND };
        assert_eq!(StepReport::with(&all, tallies, 1.0), found);
    }

    #[test]
    fn loss_and_grad_norm_are_means_over_targets() {
        let words = words(&[3.0, 5.0], &[9.0, 16.0], 4);
        assert_eq!(StepReport::of(&words, 1.0), FOUND);
        let factors = GradientFactors::of(&words, 1.0, Some(0.5), true);
        assert_eq!((factors.scale, factors.finite), (0.25, true));
        assert_eq!(factors.clip, 0.5 / (1.25 + CLIP_EPSILON));
        assert_eq!(GradientFactors::of(&words, 1.0, Some(2.0), true).clip, 1.0);
        assert_eq!(GradientFactors::of(&words, 1.0, None, true).clip, 1.0);
    }

    #[test]
    fn rank_average_is_converted_back_to_sum() {
        // A gradient of (3, 4), averaged over 8 ranks, of losses that are summed.
        let squares = [(3.0f64 / 8.0).powi(2), (4.0f64 / 8.0).powi(2)];
        let words = words(&[3.0, 5.0], &squares, 4);
        assert_eq!(StepReport::of(&words, 8.0), FOUND);
        let factors = GradientFactors::of(&words, 8.0, Some(0.5), true);
        assert_eq!((factors.scale, factors.clip), (2.0, 0.5 / (1.25 + CLIP_EPSILON)));
    }

    #[test]
    fn scaling_by_power_of_two_ranks_is_bitwise_exact() {
        for targets in 1..1000 {
            for ranks in [2.0, 8.0, 64.0, 1.0 / 65536.0] {
                assert_eq!(scale(targets, ranks), scale(targets, 1.0) * ranks);
            }
        }
        assert_eq!(scale(0, 8.0), 0.0);
    }

    #[test]
    fn non_finite_loss_norm_or_state_is_reported() {
        for (losses, squares) in [([f64::NAN], [1.0]), ([1.0], [f64::INFINITY])] {
            let words = words(&losses, &squares, 1);
            assert!(!StepReport::of(&words, 1.0).finite);
            assert!(!GradientFactors::of(&words, 1.0, Some(1.0), true).finite);
        }
        let finite_words = words(&[1.0], &[1.0], 1);
        assert!(!GradientFactors::of(&finite_words, 1.0, None, false).finite);
        for ranks in [1, 3] {
            let mut words = finite_words.clone();
            words[NOT_FINITE] = ranks;
            let found =
                StepReport { finite: false, state_finite: false, ..StepReport::of(&finite_words, 1.0) };
            assert_eq!(StepReport::of(&words, 1.0), found);
            assert!(!GradientFactors::of(&words, 1.0, Some(1.0), true).finite);
        }
        let factors = GradientFactors::of(&finite_words, 1.0, None, true);
        assert_eq!(GradientFactors::from_array(factors.to_array()), factors);
    }

    #[test]
    fn zero_targets_give_zero_loss_and_scale() {
        let words = words(&[], &[], 0);
        let StepReport { loss, grad_norm, .. } = StepReport::of(&words, 1.0);
        assert_eq!((loss, grad_norm), (0.0, 0.0));
        assert_eq!(GradientFactors::of(&words, 1.0, None, true).scale, 0.0);
    }
}
