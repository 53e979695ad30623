//! Updates of a group of parameters, as sums of products over elements.

use super::rule::{Element, Rule};
use super::{Expected, Group, SECOND};
use crate::audit::state::blocks;
use crate::audit::sums::Around;
use crate::error::TrainError;

/// Roundings of an element in one update, of its parameter and of its direction.
pub(super) const ROUNDINGS: f64 = 8.0;

/// Sums over the elements of a group. `a` is the direction, `p` the parameter before, and `d` its change, less the stated one:
/// what is nearly zero is summed itself, not as the difference of large sums.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sums {
    /// The stated learning rate, and its product with weight decay.
    pub(super) stated: Fit,
    pub(super) aa: f64,
    pub(super) ap: f64,
    pub(super) ad: f64,
    pub(super) pp: f64,
    pub(super) pd: f64,
    pub(super) dd: f64,
    /// Of the squares of the whole change.
    pub(super) change2: f64,
    /// Of the squares of what rounding of the parameter may cause.
    pub(super) param_rounding2: f64,
    /// Of the squares of the direction's rounding, for a learning rate of 1.
    pub(super) direction_rounding2: f64,
}

/// Learning rate, and its product with weight decay.
pub(super) type Fit = [f64; 2];

impl Sums {
    /// The distance of the update from that with a learning rate and a decay.
    pub(super) fn distance(&self, fit: Fit) -> f64 {
        let [lr, decay] = std::array::from_fn(|index| fit[index] - self.stated[index]);
        let square = self.dd
            + lr * lr * self.aa
            + decay * decay * self.pp
            + 2.0 * (lr * self.ad + decay * self.pd + lr * decay * self.ap);
        square.max(0.0).sqrt()
    }

    /// The learning rate and decay that explain the update best.
    pub(super) fn fit(&self) -> Fit {
        let [lr, decay] = self.stated;
        let determinant = self.aa * self.pp - self.ap * self.ap;
        if determinant <= 1e-12 * self.aa * self.pp {
            return [if self.aa > 0.0 { lr - self.ad / self.aa } else { lr }, decay];
        }
        [
            lr + (self.pd * self.ap - self.ad * self.pp) / determinant,
            decay + (self.ad * self.ap - self.pd * self.aa) / determinant,
        ]
    }

    /// The decay that explains the update best with the stated learning rate, times that.
    pub(super) fn decay_alone(&self) -> f64 {
        if self.pp > 0.0 { self.stated[1] - self.pd / self.pp } else { self.stated[1] }
    }

    /// The learning rate that explains the update best with a weight decay.
    pub(super) fn rate_alone(&self, decay: f64) -> f64 {
        let update2 = self.aa + 2.0 * decay * self.ap + decay * decay * self.pp;
        if update2 > 0.0 { self.stated[0] - (self.ad + decay * self.pd) / update2 } else { self.stated[0] }
    }

    pub(super) fn bound(&self, lr: f64) -> f64 {
        ROUNDINGS * (self.param_rounding2 + lr * lr * self.direction_rounding2).sqrt()
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
    for &id in &group.params {
        let unit = around.after.param_rounding(id);
        let moment_unit =
            around.after.moment_rounding(id, around.moments.first).max(unit.min(2f64.powi(-24)));
        let own_step = expected.own_steps[&id];
        for rows in blocks(around.spec, id) {
            let [before, after] = around.first_moments(id, rows.clone())?;
            let second = around.after.moment(id, SECOND, rows.clone())?;
            let params = [around.before.param(id, rows.clone())?, around.after.param(id, rows)?];
            for at in 0..before.len() {
                let gradient = around.moments.gradient(before[at], after[at]);
                let element =
                    Element { first: after[at], first_before: before[at], second: second[at], gradient };
                let (p, change) = (params[0][at], params[1][at] - params[0][at]);
                for (rule, sums) in rules.iter().zip(&mut sums) {
                    let direction = (rule.direction)(&element, own_step);
                    sums.aa += direction * direction;
                    sums.ap += direction * p;
                    let d = change + stated[0] * direction + stated[1] * p;
                    sums.ad += direction * d;
                    sums.pp += p * p;
                    sums.pd += p * d;
                    sums.dd += d * d;
                    sums.change2 += change * change;
                    sums.param_rounding2 += (unit * params[1][at].abs().max(p.abs())).powi(2);
                    sums.direction_rounding2 += (moment_unit * direction).powi(2);
                }
            }
        }
    }
    Ok(sums)
}
