//! The training losses of a run, and whether a saved state is worth continuing from, by its own loss.
//!
//! A loss that is finite says little: weights that one step with an absurd learning rate has spoiled may give a loss of
//! 2e9. So the loss of a state is compared with two others. *Knowing nothing* costs ln V for a vocabulary of V tokens,
//! or what the run began with, if that is more; weights that are one nat worse than that (perplexity times e) are no
//! untrained model whose batch happens to be hard. The *median* of the losses before is what the run usually reached. A
//! state is worth continuing up to the middle of both: above, the run has lost more than half of what it had learned.
//!
//! Weights that are larger still may overflow inside of the model, and come out as the same logit for every token: a
//! loss of ln V, and a gradient of zero. Such a state never changes again.

use crate::metrics::StepLoss;

/// The losses of a run, in the order of steps.
#[derive(Clone, Debug)]
pub(super) struct Losses {
    /// The loss of a model that gives every token the same probability.
    uniform: f64,
    by_step: Vec<StepLoss>,
}

/// How much worse than knowing nothing a batch of an untrained model may be, in nats.
const MARGIN: f64 = 1.0;

/// Why a state is not worth continuing from, by its own loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Spoiled {
    /// The loss is too high.
    High(f64),
    /// The gradient is zero.
    Dead,
}

impl Losses {
    /// Creates an empty history for a model with this vocabulary.
    #[expect(clippy::cast_precision_loss, reason = "a number of tokens")]
    pub(super) fn new(vocab: usize) -> Self {
        Self { uniform: (vocab as f64).ln(), by_step: Vec::new() }
    }

    /// Adds the losses of steps before this start of the run.
    pub(super) fn begin_with(&mut self, earlier: Vec<StepLoss>) {
        self.by_step.splice(0..0, earlier);
    }

    /// Adds the loss of the next step.
    pub(super) fn push(&mut self, loss: StepLoss) {
        self.by_step.push(loss);
    }

    /// The first loss of the run.
    pub(super) fn first(&self) -> Option<f64> {
        self.by_step.iter().map(|of_step| of_step.loss).find(|loss| loss.is_finite())
    }

    /// What is wrong with the state after `done` steps, if anything, by what the next step computed from it; `None` if
    /// that step was not done.
    pub(super) fn judge(&self, done: u64) -> Option<Result<(), Spoiled>> {
        let at = self.by_step.binary_search_by_key(&(done + 1), |of_step| of_step.step).ok()?;
        let StepLoss { loss, grad_norm, .. } = self.by_step[at];
        // A batch without targets has neither loss nor gradient.
        Some(match (self.is_sound(done, loss), loss > 0.0 && grad_norm == 0.0) {
            (true, false) => Ok(()),
            (true, true) => Err(Spoiled::Dead),
            (false, _) => Err(Spoiled::High(loss)),
        })
    }

    /// The newest state up to step `until` that is known to be sound; 0 if none is.
    pub(super) fn newest_sound(&self, until: u64) -> u64 {
        let mut states =
            self.by_step.iter().rev().map(|of_step| of_step.step - 1).filter(|&done| done <= until);
        let is_sound = |&done: &u64| self.judge(done).is_some_and(|judged| judged.is_ok());
        states.find(is_sound).unwrap_or(0)
    }

    /// Whether a loss of the state after `done` steps is one to continue from.
    pub(super) fn is_sound(&self, done: u64, loss: f64) -> bool {
        let nothing = self.first().map_or(self.uniform, |first| first.max(self.uniform)) + MARGIN;
        // The median is not negative and no bound is above `nothing`, so most losses need no median.
        loss <= nothing / 2.0
            || loss <= nothing
                && loss <= f64::midpoint(self.median(done).unwrap_or(nothing).min(nothing), nothing)
    }

    /// The median of the losses up to step `done`: those of all states before the one after that step.
    fn median(&self, done: u64) -> Option<f64> {
        let until = self.by_step.partition_point(|of_step| of_step.step <= done);
        let mut before: Vec<f64> = self.by_step[..until]
            .iter()
            .map(|of_step| of_step.loss)
            .filter(|loss| loss.is_finite())
            .collect();
        let middle = before.len() / 2;
        (!before.is_empty()).then(|| *before.select_nth_unstable_by(middle, f64::total_cmp).1)
    }
}

#[cfg(test)]
mod tests;
