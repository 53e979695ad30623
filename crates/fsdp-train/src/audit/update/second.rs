//! Whether second moments follow from the gradient.

use fsdp_config::AdamwConfig;

use super::expected::{Expected, SECOND};
use super::sums::ROUNDINGS;
use crate::audit::fit::Fit;
use crate::audit::moments::written;
use crate::audit::report::{Cause, Finding, number};
use crate::audit::state::blocks;
use crate::audit::sums::Around;
use crate::error::TrainError;

/// Sums of the second moment.
#[derive(Clone, Copy, Debug, Default)]
struct Seconds {
    /// Of the moment before (`a`), the square of the gradient (`b`), and the moment after, less the stated one (`d`).
    fit: Fit,
    /// Of the squares of the rounding of the moment, and of the squared gradient for a gain of 1.
    rounding2: f64,
    square_rounding2: f64,
}

/// Whether second moments follow from the gradient; otherwise what is wrong, and the decay that fits.
pub(super) fn second_moments(
    around: &mut Around<'_>,
    config: &AdamwConfig,
    expected: &Expected<'_>,
) -> Result<Option<(Finding, f64)>, TrainError> {
    let stated = [config.betas[1], 1.0 - config.betas[1]];
    let sums = seconds(around, stated, expected)?;
    let bound = |gain: f64| ROUNDINGS * (sums.rounding2 + gain * gain * sums.square_rounding2).sqrt();
    let whole = sums.fit.distance([0.0, 0.0]);
    if whole <= bound(stated[1]) {
        return Ok(None);
    }
    let change =
        sums.fit.nearest().filter(|change| sums.fit.distance(*change) <= bound(stated[1] + change[1]));
    let explains = 1.0 - (sums.fit.distance(change.unwrap_or_default()) / whole).powi(2);
    let (text, beta) = match change {
        Some(change) => {
            let [decay, gain] = [written(stated[0] + change[0]), stated[1] + change[1]];
            let text = format!(
                "the second moment decays by {} and takes up {} of the squared gradient; the run file says {} and {}",
                number(decay),
                number(gain),
                number(stated[0]),
                number(stated[1])
            );
            (text, decay)
        }
        None => ("the second moment does not follow from the gradient".to_owned(), stated[0]),
    };
    Ok(Some((Finding::of_all(Cause::UpdateRule, explains, text), beta)))
}

fn seconds(
    around: &mut Around<'_>,
    [decay, gain]: [f64; 2],
    expected: &Expected<'_>,
) -> Result<Seconds, TrainError> {
    let mut sums = Seconds::default();
    let moments = around.moments;
    for id in expected.settings.keys().copied() {
        let [_, first_unit] = around.first_roundings(id);
        let unit = around.after.moment_rounding(id, SECOND);
        for rows in blocks(around.spec, id) {
            let [before, after] = around.first_moments(id, rows.clone())?;
            let [old, new] =
                [around.before.moment(id, SECOND, rows.clone())?, around.after.moment(id, SECOND, rows)?];
            for at in 0..old.len() {
                let gradient = moments.gradient(before[at], after[at]);
                let (v, n, q) = (old[at], new[at], gradient * gradient);
                sums.fit.add(v, q, n - decay * v - gain * q);
                let error = first_unit * (after[at].abs() + before[at].abs()) / moments.gain;
                sums.rounding2 += (unit * n).powi(2);
                sums.square_rounding2 += (2.0 * gradient * error + error * error).powi(2);
            }
        }
    }
    Ok(sums)
}
