//! The `[train.early_stop]` table: when evaluations say that nothing more is learned. Absent, all steps are trained.

use serde::{Deserialize, Serialize};

use super::error::ConfigError;
use super::kind::{NON_NEGATIVE, POSITIVE_COUNT, TEXT};
use super::reader::Reader;
use super::table::table;
use super::written;

table! {
    /// The `[train.early_stop]` table.
    pub struct EarlyStopConfig {
        /// The run ends after so many evaluations in a row without a lower loss.
        patience: u64 = required(POSITIVE_COUNT),
        /// By how much a loss must be lower than the lowest one before, to count.
        min_delta: f64 = or(NON_NEGATIVE, 0.0),
        /// The evaluation set that is watched, by its name; none means the first.
        set: Option<String> = or_none(TEXT),
    }
}

/// The loss of the evaluation set that is watched, after so many steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WatchedLoss {
    /// Steps done.
    pub step: u64,
    /// The loss.
    pub loss: f64,
}

impl EarlyStopConfig {
    /// Whether a run whose losses these are is to end.
    pub fn is_over(&self, losses: &[WatchedLoss]) -> bool {
        let (mut lowest, mut since) = (f64::INFINITY, 0);
        for WatchedLoss { loss, .. } in losses {
            if *loss < lowest - self.min_delta {
                (lowest, since) = (*loss, 0);
            } else {
                since += 1;
            }
        }
        since >= self.patience
    }
}

impl WatchedLoss {
    /// From the lowest on; of equal ones the first one first.
    pub fn from_lowest(losses: &[WatchedLoss]) -> Vec<WatchedLoss> {
        let mut sorted = losses.to_vec();
        sorted.sort_by(|one, other| one.loss.total_cmp(&other.loss));
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
    fn a_run_is_over_when_so_many_evaluations_in_a_row_are_no_lower() {
        assert!(!is_over(1, 0.0, &[]));
        assert!(!is_over(1, 0.0, &[3.0]));
        assert!(is_over(1, 0.0, &[3.0, 3.0]));
        assert!(!is_over(2, 0.0, &[3.0, 3.0]));
        assert!(!is_over(2, 0.0, &[3.0, 4.0, 2.0, 2.5]));
        assert!(is_over(2, 0.0, &[3.0, 4.0, 2.0, 2.5, 2.0]));
        // A little lower is not lower, however often.
        assert!(is_over(3, 0.1, &[3.0, 2.95, 2.93, 2.91]));
        assert!(!is_over(3, 0.1, &[3.0, 2.95, 2.93, 2.89]));
    }

    #[test]
    fn of_equal_losses_the_first_one_is_the_lower() {
        let losses: Vec<WatchedLoss> = [4.0, 2.0, f64::NAN, 3.0, 2.0]
            .iter()
            .zip(1..)
            .map(|(&loss, step)| WatchedLoss { step, loss })
            .collect();
        let steps: Vec<u64> = WatchedLoss::from_lowest(&losses).iter().map(|loss| loss.step).collect();
        assert_eq!(steps, [2, 5, 4, 1, 3]);
    }
}
