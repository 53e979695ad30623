//! The `[train.early_stop]` table: ends a run once its evaluations stop improving. Without it, all steps are trained.

use serde::{Deserialize, Serialize};

use super::error::ConfigError;
use super::kind::{NON_NEGATIVE, POSITIVE_COUNT, TEXT};
use super::reader::Reader;
use super::table::table;
use super::writer;

table! {
    /// The `[train.early_stop]` table.
    pub struct EarlyStopConfig {
        /// The run ends after this many evaluations in a row without a lower loss.
        patience: u64 = required(POSITIVE_COUNT),
        /// How far below the lowest loss so far a loss must be to count as lower.
        min_delta: f64 = or(NON_NEGATIVE, 0.0),
        /// Name of the evaluation set to watch; none means the first.
        set: Option<String> = or_none(TEXT),
    }
}

/// The loss of the watched evaluation set after some step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WatchedLoss {
    /// Number of steps done.
    pub step: u64,
    /// Evaluation loss.
    pub loss: f64,
}

impl EarlyStopConfig {
    /// Whether a run with these losses, in the order of steps, should end.
    pub fn is_over(&self, losses: &[WatchedLoss]) -> bool {
        let (mut lowest, mut evaluations_since) = (f64::INFINITY, 0);
        for WatchedLoss { loss, .. } in losses {
            if *loss < lowest - self.min_delta {
                (lowest, evaluations_since) = (*loss, 0);
            } else {
                evaluations_since += 1;
            }
        }
        evaluations_since >= self.patience
    }
}

impl WatchedLoss {
    /// Sorts from the lowest loss up; equal losses keep their order.
    pub fn from_lowest(losses: &[WatchedLoss]) -> Vec<WatchedLoss> {
        let mut sorted = losses.to_vec();
        sorted.sort_by(|a, b| a.loss.total_cmp(&b.loss));
        sorted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_over(patience: u64, min_delta: f64, losses: &[f64]) -> bool {
        let losses: Vec<WatchedLoss> =
            losses.iter().zip(1..).map(|(&loss, step)| WatchedLoss { step, loss }).collect();
        EarlyStopConfig { patience, min_delta, set: None }.is_over(&losses)
    }

    #[test]
    fn run_stops_after_patience_evaluations_without_improvement() {
        assert!(!is_over(1, 0.0, &[]));
        assert!(!is_over(1, 0.0, &[3.0]));
        assert!(is_over(1, 0.0, &[3.0, 3.0]));
        assert!(!is_over(2, 0.0, &[3.0, 3.0]));
        assert!(!is_over(2, 0.0, &[3.0, 4.0, 2.0, 2.5]));
        assert!(is_over(2, 0.0, &[3.0, 4.0, 2.0, 2.5, 2.0]));
        // Improvements of less than `min_delta` do not count, however many there are.
        assert!(is_over(3, 0.1, &[3.0, 2.95, 2.93, 2.91]));
        assert!(!is_over(3, 0.1, &[3.0, 2.95, 2.93, 2.89]));
    }

    #[test]
    fn equal_losses_rank_earlier_step_first() {
        let losses: Vec<WatchedLoss> = [4.0, 2.0, f64::NAN, 3.0, 2.0]
            .iter()
            .zip(1..)
            .map(|(&loss, step)| WatchedLoss { step, loss })
            .collect();
        let steps: Vec<u64> = WatchedLoss::from_lowest(&losses).iter().map(|loss| loss.step).collect();
        assert_eq!(steps, [2, 5, 4, 1, 3]);
    }
}
