//! Rules of AdamW whose numbers are fitted to the update: another epsilon, or another step of the bias correction.

use fsdp_config::AdamwConfig;

use super::expected::{Expected, Group, SECOND};
use super::explain::Judged;
use super::rule::{Rule, correction};
use super::sums::Rates;
use crate::audit::fit::Fit;
use crate::audit::state::blocks;
use crate::audit::sums::Around;
use crate::error::TrainError;

/// How many times its rounding a direction has to be, to say something of epsilon.
const SIGNIFICANT: f64 = 16.0;

/// Relative error up to which a fitted epsilon counts as one that somebody would write.
const EPSILON_ERROR: f64 = 1e-2;

/// Relative error of the learning rate up to which another step of the bias correction is tried: epsilon is not in it.
const RATE_ERROR: f64 = 2e-2;

/// Steps of the bias correction that are tried beyond twice the number of steps.
const STEPS_BEYOND: u64 = 10;

/// From here on no step of the bias correction differs from the next by more than rounding.
const STEPS_MAX: u64 = 1 << 16;

/// The rules with other numbers that the update points to.
///
/// # Errors
/// Errors of reading.
pub(super) fn fitted_rules(
    around: &mut Around<'_>,
    config: &AdamwConfig,
    (groups, judged): (&[Group], &[Judged<'_>]),
    expected: &Expected<'_>,
) -> Result<Vec<Rule>, TrainError> {
    let stated: Vec<Rates> = judged.iter().map(Judged::stated).collect();
    let fit = epsilon_fit(around, config, (groups, &stated), expected)?;
    let epsilon = fit.along([0.0, 1.0]).and_then(|eps| written(config, eps));
    let step = expected.own_steps.values().copied().max().unwrap_or(1);
    let rules = epsilon.map(|eps| Rule::with_epsilon(config, eps));
    let other = corrected_step(judged, config, step).map(|other| Rule::in_step(config, other, step));
    Ok(rules.into_iter().chain(other).collect())
}

/// AdamW with the epsilon that explains the update best if learning rate and decay are others, too.
///
/// # Errors
/// Errors of reading.
pub(super) fn epsilon_beside_rates(
    around: &mut Around<'_>,
    config: &AdamwConfig,
    (groups, judged): (&[Group], &[Judged<'_>]),
    expected: &Expected<'_>,
) -> Result<Option<Rule>, TrainError> {
    let found: Vec<Rates> = judged.iter().map(|group| [group.lr, group.sums[0].nearest()[1]]).collect();
    let fit = epsilon_fit(around, config, (groups, &found), expected)?;
    let epsilon = fit.nearest().and_then(|[_, eps]| written(config, eps));
    Ok(epsilon.map(|eps| Rule::with_epsilon(config, eps)))
}

/// An epsilon as somebody would write it, if it is one, and another than that of the run file.
fn written(config: &AdamwConfig, found: f64) -> Option<f64> {
    let near: f64 = format!("{found:.1e}").parse().unwrap_or(found);
    let eps = if (near - found).abs() <= EPSILON_ERROR * found { near } else { found };
    (eps > 0.0 && eps.is_finite() && eps != config.eps).then_some(eps)
}

/// The change of the learning rate, relative to it (`a`), and epsilon (`b`) follow from the directions of given rates:
/// direction * (root + eps) = rate * moment.
fn epsilon_fit(
    around: &mut Around<'_>,
    config: &AdamwConfig,
    (groups, rates): (&[Group], &[Rates]),
    expected: &Expected<'_>,
) -> Result<Fit, TrainError> {
    let mut fit = Fit::default();
    for (group, [lr, decay]) in groups.iter().zip(rates) {
        for &id in &group.params {
            let unit = around.after.param_rounding(id);
            let [first, second] = config.betas.map(|beta| correction(beta, expected.own_steps[&id]));
            for rows in blocks(around.spec, id) {
                let [_, moments] = around.first_moments(id, rows.clone())?;
                let squares = around.after.moment(id, SECOND, rows.clone())?;
                let params = [around.before.param(id, rows.clone())?, around.after.param(id, rows)?];
                for at in 0..moments.len() {
                    let (p, new) = (params[0][at], params[1][at]);
                    let direction = (p - new - decay * p) / lr;
                    let error = unit * p.abs().max(new.abs()) / lr;
                    let (moment, root) = (moments[at] / first, (squares[at] / second).sqrt());
                    if moment == 0.0 || direction.abs().is_nan() || direction.abs() < SIGNIFICANT * error {
                        continue;
                    }
                    // Each equation counts by its error, which is that of the direction times (root + eps).
                    let weight = direction / (error * moment);
                    if weight.is_finite() {
                        let left = direction * root - moment;
                        fit.add(weight * moment, -weight * direction, weight * left);
                    }
                }
            }
        }
    }
    Ok(fit)
}

/// The step whose bias correction would explain another learning rate beside the same decay.
fn corrected_step(judged: &[Judged<'_>], config: &AdamwConfig, step: u64) -> Option<u64> {
    let (product, square) = judged.iter().fold((0.0, 0.0), |(product, square), group| {
        let fit = &group.sums[0].fit;
        (product + group.lr * fit.ad, square + group.lr * group.lr * fit.aa)
    });
    let rate = |step: u64| correction(config.betas[1], step).sqrt() / correction(config.betas[0], step);
    let wanted = rate(step) * (1.0 + product / square);
    let distance = |other: &u64| (rate(*other) / wanted - 1.0).abs();
    let steps = 1..=(2 * step + STEPS_BEYOND).min(STEPS_MAX);
    let nearest = steps.filter(|other| *other != step).min_by(|a, b| distance(a).total_cmp(&distance(b)));
    nearest.filter(|other| distance(other) <= RATE_ERROR)
}
