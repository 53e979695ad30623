//! Updates of a group of parameters, as sums of products over elements.

use super::expected::{Expected, Group, LARGEST, SECOND};
use super::rule::{Element, Rule};
use crate::audit::fit::Fit;
use crate::audit::state::blocks;
use crate::audit::sums::Around;
use crate::error::TrainError;

/// Roundings of an element in one update, of its parameter and of its direction.
pub(in crate::audit) const ROUNDINGS: f64 = 8.0;

/// Half of the distance between neighboring numbers near 1 in `bf16`.
const BF16_ROUNDING: f64 = 1.0 / 512.0;

/// Sums over the elements of a group.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sums {
    /// The stated learning rate, and its product with weight decay.
    pub(super) stated: Rates,
    /// Of the direction (`a`), the parameter before (`b`), and what they explain of its change beyond the stated update (`d`).
    pub(super) fit: Fit,
    /// Of the squares of the whole change.
    pub(super) change2: f64,
    /// Of the squares of what rounding of the parameter may cause.
    pub(super) param_rounding2: f64,
    /// The same, if the parameter is rounded to `bf16`.
    pub(super) coarse_rounding2: f64,
    /// Whether an element is not a number of `bf16` after the step.
    pub(super) is_fine: bool,
    /// Of the squares of the direction's rounding, for a learning rate of 1.
    pub(super) direction_rounding2: f64,
}

/// Learning rate, and its product with weight decay.
pub(super) type Rates = [f64; 2];

impl Sums {
    /// The distance of the update from that with a learning rate and a decay.
    pub(super) fn distance(&self, rates: Rates) -> f64 {
        self.fit.distance(std::array::from_fn(|index| rates[index] - self.stated[index]))
    }

    /// The learning rate and decay that explain the update best.
    pub(super) fn nearest(&self) -> Rates {
        let [lr, decay] = self.stated;
        match self.fit.nearest() {
            Some(other) => [lr + other[0], decay + other[1]],
            None => [lr + self.fit.along([1.0, 0.0]).unwrap_or(0.0), decay],
        }
    }

    /// The decay that explains the update best with the stated learning rate, times that.
    pub(super) fn decay_alone(&self) -> f64 {
        self.stated[1] + self.fit.along([0.0, 1.0]).unwrap_or(0.0)
    }

    /// The learning rate that explains the update best with a weight decay.
    pub(super) fn rate_alone(&self, decay: f64) -> f64 {
        self.stated[0] + self.fit.along([1.0, decay]).unwrap_or(0.0)
    }

    pub(super) fn bound(&self, lr: f64) -> f64 {
        ROUNDINGS * (self.param_rounding2 + lr * lr * self.direction_rounding2).sqrt()
    }

    /// Whether rounding to `bf16` explains what the stated update leaves.
    pub(super) fn is_rounded(&self) -> bool {
        !self.is_fine && self.distance(self.stated) <= ROUNDINGS * self.coarse_rounding2.sqrt()
    }
}

/// The sums of a group, for each rule.
pub(super) fn sums(
    around: &mut Around<'_>,
    group: &Group,
    rules: &[Rule],
    expected: &Expected<'_>,
) -> Result<Vec<Sums>, TrainError> {
    let lr = expected.lr * group.settings.lr_scale;
    let stated = [lr, lr * group.settings.weight_decay];
    let mut sums = vec![Sums { stated, ..Sums::default() }; rules.len()];
    let moments = around.moments;
    let Some(name) = moments.first else { return Ok(sums) };
    for &id in &group.params {
        let unit = around.after.param_rounding(id);
        let [first_before, first_after] = around.first_roundings(id);
        let moment_unit = around.after.moment_rounding(id, name).max(unit.min(2f64.powi(-24)));
        let own_step = expected.own_steps[&id];
        for rows in blocks(around.spec, id) {
            let [before, after] = around.first_moments(id, rows.clone())?;
            let second = around.after.moment(id, SECOND, rows.clone())?;
            let largest = around.after.moment(id, LARGEST, rows.clone())?;
            let params = [around.before.param(id, rows.clone())?, around.after.param(id, rows)?];
            for at in 0..before.len() {
                let (m, n) = (before[at], after[at]);
                let element = Element {
                    first: n,
                    first_before: m,
                    second: second[at],
                    largest: largest[at],
                    gradient: moments.gradient(m, n),
                    error: ROUNDINGS * (first_after * n.abs() + first_before * moments.decay * m.abs())
                        / moments.gain,
                };
                let (p, change) = (params[0][at], params[1][at] - params[0][at]);
                let size = params[1][at].abs().max(p.abs());
                let is_fine = f64::from(params[1][at] as f32) == params[1][at]
                    && (params[1][at] as f32).to_bits() & 0xffff != 0;
                for (rule, sums) in rules.iter().zip(&mut sums) {
                    let Some(direction) = (rule.direction)(&element, own_step) else { continue };
                    sums.fit.add(direction, p, -change - stated[0] * direction - stated[1] * p);
                    sums.change2 += change * change;
                    sums.param_rounding2 += (unit * size).powi(2);
                    sums.coarse_rounding2 += (BF16_ROUNDING * size).powi(2);
                    sums.is_fine |= is_fine;
                    sums.direction_rounding2 += (moment_unit * direction).powi(2);
                }
            }
        }
    }
    Ok(sums)
}
