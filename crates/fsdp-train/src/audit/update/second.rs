//! Whether second moments follow from the gradient.

use super::sums::ROUNDINGS;
use super::{Expected, SECOND};
use crate::audit::report::{Cause, Finding};
use crate::audit::scale::number;
use crate::audit::state::blocks;
use crate::audit::sums::Around;
use crate::config::AdamwConfig;
use crate::error::TrainError;

/// Sums of the second moment: `v` before, `q` the square of the gradient, `d` the moment after, less the stated one.
#[derive(Clone, Copy, Debug, Default)]
struct Seconds {
    vv: f64,
    qv: f64,
    qq: f64,
    dd: f64,
    dv: f64,
    dq: f64,
    /// Of the squares of the rounding of the moment, and of `q` for a gain of 1.
    rounding2: f64,
    square_rounding2: f64,
}

/// Whether second moments follow from the gradient; otherwise what is wrong, and the decay that fits.
pub(super) fn second_moments(
    around: &mut Around<'_>,
    config: &AdamwConfig,
    expected: &Expected<'_>,
) -> Result<Option<(Finding, f64)>, TrainError> {
    let beta = config.betas[1];
    let mut sums = Seconds::default();
    for id in expected.settings.keys().copied() {
        let [first_unit, unit] =
            [around.moments.first, SECOND].map(|name| around.after.moment_rounding(id, name));
        for rows in blocks(around.spec, id) {
            let [before, after] = around.first_moments(id, rows.clone())?;
            let [old, new] =
                [around.before.moment(id, SECOND, rows.clone())?, around.after.moment(id, SECOND, rows)?];
            for at in 0..old.len() {
                let gradient = around.moments.gradient(before[at], after[at]);
                let (v, n, q) = (old[at], new[at], gradient * gradient);
                let d = n - beta * v - (1.0 - beta) * q;
                sums.vv += v * v;
                sums.qv += q * v;
                sums.qq += q * q;
                sums.dd += d * d;
                sums.dv += d * v;
                sums.dq += d * q;
                let error = first_unit * (after[at].abs() + before[at].abs()) / around.moments.gain;
                sums.rounding2 += (unit * n).powi(2);
                sums.square_rounding2 += (2.0 * gradient * error + error * error).powi(2);
            }
        }
    }
    let distance = |decay: f64, gain: f64| {
        let (decay, gain) = (decay - beta, gain - (1.0 - beta));
        let square = sums.dd + decay * decay * sums.vv + gain * gain * sums.qq
            - 2.0 * (decay * sums.dv + gain * sums.dq - decay * gain * sums.qv);
        square.max(0.0).sqrt()
    };
    let bound = |gain: f64| ROUNDINGS * (sums.rounding2 + gain * gain * sums.square_rounding2).sqrt();
    if distance(beta, 1.0 - beta) <= bound(1.0 - beta) {
        return Ok(None);
    }
    let determinant = sums.vv * sums.qq - sums.qv * sums.qv;
    let decay = beta + (sums.dv * sums.qq - sums.dq * sums.qv) / determinant;
    let gain = 1.0 - beta + (sums.dq * sums.vv - sums.dv * sums.qv) / determinant;
    let explains = 1.0 - (distance(decay, gain) / distance(beta, 1.0 - beta)).powi(2);
    let (text, beta) = match determinant > 0.0 && distance(decay, gain) <= bound(gain) {
        true => {
            let text = format!(
                "the second moment decays by {} and takes up {} of the squared gradient; the run file says {} and {}",
                number(decay),
                number(gain),
                number(beta),
                number(1.0 - beta)
            );
            (text, decay)
        }
        false => ("the second moment does not follow from the gradient".to_owned(), beta),
    };
    Ok(Some((Finding { cause: Cause::UpdateRule, params: Vec::new(), factor: None, explains, text }, beta)))
}
