//! Whether one state is what became of another.

use std::path::Path;

use fsdp_config::OptimizerConfig;
use fsdp_core::model::ParamId;

use super::state::blocks;
use super::sums::Around;
use super::update::SECOND;
use crate::error::TrainError;

/// The least part of a second moment that a step of Adam leaves: v' = b2 v + (1 - b2) g^2, and nobody uses a smaller b2.
const KEPT_MIN: f64 = 0.85;

/// The share of elements that may have less, by states that were rounded.
const LESS_MAX: f64 = 0.01;

/// Refuses a state whose second moments have fallen as they cannot in one step, where neither its gradient nor its update is
/// that of the step.
///
/// # Errors
/// [`TrainError::Input`] for such a state; errors of reading.
pub(super) fn expect(
    around: &mut Around<'_>,
    optimizer: &OptimizerConfig,
    [before, after]: [&Path; 2],
) -> Result<(), TrainError> {
    if !matches!(optimizer, OptimizerConfig::Adamw(_)) {
        return Ok(());
    }
    let (mut all, mut less) = (0usize, 0usize);
    let trained = (0..around.spec.params.len()).map(ParamId).filter(|id| around.spec.param(*id).trainable);
    for id in trained {
        for rows in blocks(around.spec, id) {
            let old = around.before.moment(id, SECOND, rows.clone())?;
            let new = around.after.moment(id, SECOND, rows)?;
            let (of_all, of_less) = fallen(&old, &new);
            (all, less) = (all + of_all, less + of_less);
        }
    }
    let share = less as f64 / all.max(1) as f64;
    if share <= LESS_MAX {
        return Ok(());
    }
    Err(TrainError::Input(format!(
        "{} does not follow {}: {:.0} % of the second moments are much smaller than before, and one step of Adam does not make \
         them so; give two states of one run, between which its optimizer was not created anew",
        after.display(),
        before.display(),
        100.0 * share
    )))
}

/// The number of second moments that were not zero, and of those that are smaller now than one step makes them.
fn fallen(old: &[f64], new: &[f64]) -> (usize, usize) {
    let moments = || old.iter().zip(new).filter(|(old, _)| **old > f64::from(f32::MIN_POSITIVE));
    (moments().count(), moments().filter(|(old, new)| **new < KEPT_MIN * **old).count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_moments_below_what_a_step_keeps_have_fallen() {
        let step = |v: f64, g: f64| 0.9 * v + 0.1 * g * g;
        let old = [1e-6, 4.0, 0.0, 1e-30, 2.0];
        let one_step = [step(1e-6, 0.0), step(4.0, 0.1), step(0.0, 0.0), step(1e-30, 1e-10), step(2.0, 3.0)];
        assert_eq!(fallen(&old, &one_step), (4, 0));
        assert_eq!(fallen(&old, &[1e-7, 4.0, 0.0, 1e-30, 1.0]), (4, 2));
    }
}
