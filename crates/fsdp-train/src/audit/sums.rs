//! Comparisons of gradients, as sums of products over the elements of each parameter.
//!
//! Everything that is fitted here is linear (a factor, a share of another vector), so these sums say how well any
//! combination explains what was found, without another pass over the elements.

use std::collections::BTreeSet;
use std::ops::{Add, Range};

use fsdp_core::model::{ModelSpec, ParamId};

use super::moments::Moments;
use super::ranks::Ranks;
use super::report::{Cause, Finding, shown};
use super::state::{State, blocks};
use crate::error::TrainError;

/// PyTorch's `clip_grad_norm_` adds this to the norm before dividing.
const CLIP_EPSILON: f64 = 1e-6;

/// Sums over elements. `u` is the gradient that the update used, `e` the expected one before clipping, `d` the difference of `u`
/// from `clip * e`, `m` and `n` the first moments before and after the step, `p` the parameter.
///
/// What is nearly zero if the step is sound (`d`) is summed itself: as a difference of large sums it would be lost in their
/// rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Sums {
    /// The coefficient of clipping.
    pub(super) clip: f64,
    pub(super) uu: f64,
    pub(super) ee: f64,
    pub(super) dd: f64,
    pub(super) de: f64,
    pub(super) dp: f64,
    pub(super) ep: f64,
    pub(super) pp: f64,
    pub(super) pm: f64,
    pub(super) mm: f64,
    pub(super) mn: f64,
    pub(super) nn: f64,
    pub(super) em: f64,
    /// The largest absolute value of `u`.
    pub(super) largest: f64,
    /// The largest absolute value of `e`.
    pub(super) peak: f64,
    /// The sum of the absolute values of `e`.
    pub(super) abs: f64,
}

impl Sums {
    /// The squared distance of `u` from `factor * e`.
    pub(super) fn distance2(&self, factor: f64) -> f64 {
        let other = factor - self.clip;
        (self.dd - 2.0 * other * self.de + other * other * self.ee).max(0.0)
    }

    /// The same sums for another coefficient of clipping. They stay exact if that is near the one that they have.
    pub(super) fn clipped(&self, clip: f64) -> Sums {
        let other = clip - self.clip;
        Sums {
            clip,
            dd: self.distance2(clip),
            de: self.de - other * self.ee,
            dp: self.dp - other * self.ep,
            ..*self
        }
    }

    /// The factor of `e` that is nearest to `u`; `None` without an expected gradient.
    pub(super) fn factor(&self) -> Option<f64> {
        (self.ee > 0.0).then(|| self.clip + self.de / self.ee)
    }

    /// What no factor explains, as a length.
    pub(super) fn leftover(&self) -> f64 {
        self.factor().map_or(self.uu, |factor| self.distance2(factor)).sqrt()
    }

    /// The cosine between both gradients; `None` if one of them is zero.
    pub(super) fn cosine(&self) -> Option<f64> {
        let norms = (self.uu * self.ee).sqrt();
        (norms > 0.0).then(|| (self.de + self.clip * self.ee) / norms)
    }
}

impl Add for Sums {
    type Output = Sums;

    fn add(self, other: Sums) -> Sums {
        Sums {
            clip: self.clip.max(other.clip),
            uu: self.uu + other.uu,
            ee: self.ee + other.ee,
            dd: self.dd + other.dd,
            de: self.de + other.de,
            dp: self.dp + other.dp,
            ep: self.ep + other.ep,
            pp: self.pp + other.pp,
            pm: self.pm + other.pm,
            mm: self.mm + other.mm,
            mn: self.mn + other.mn,
            nn: self.nn + other.nn,
            em: self.em + other.em,
            largest: self.largest.max(other.largest),
            peak: self.peak.max(other.peak),
            abs: self.abs + other.abs,
        }
    }
}

/// The sums over all parameters.
pub(super) fn total(sums: &[Sums]) -> Sums {
    sums.iter().fold(Sums::default(), |all, one| all + *one)
}

/// The coefficient of clipping by the norm of a gradient; 1 without clipping.
pub(super) fn clip(max: Option<f64>, norm: f64) -> f64 {
    max.map_or(1.0, |max| (max / (norm + CLIP_EPSILON)).min(1.0))
}

/// The states around the step.
pub(super) struct Around<'a> {
    pub(super) before: State<'a>,
    pub(super) after: State<'a>,
    pub(super) ranks: Ranks,
    pub(super) moments: Moments,
    /// Whether the first moment does not follow the run file, and nothing known well enough to judge the update by it.
    pub(super) is_open: bool,
    /// The learning rate of each parameter.
    pub(super) rates: Vec<f64>,
    pub(super) spec: &'a ModelSpec,
    /// The parameters that the optimizer left as they were, because they had no gradient (`None` in PyTorch).
    pub(super) skipped: BTreeSet<ParamId>,
    /// The decay of each parameter that the rule adds to its gradient; 0 for rules that do not.
    pub(super) coupled_decay: Vec<f64>,
    pub(super) grad_clip: Option<f64>,
    /// About the coefficient of clipping: 1, and after the first gradient that of its norm.
    pub(super) near_clip: f64,
}

impl<'a> Around<'a> {
    /// Opens both states.
    ///
    /// # Errors
    /// Errors of reading.
    pub(super) fn open(
        [before, after]: [State<'a>; 2],
        ranks: Ranks,
        moments: Moments,
        spec: &'a ModelSpec,
        [coupled_decay, rates]: [Vec<f64>; 2],
        grad_clip: Option<f64>,
    ) -> Result<Self, TrainError> {
        let mut around = Around {
            before,
            after,
            ranks,
            moments,
            is_open: false,
            rates,
            spec,
            skipped: BTreeSet::new(),
            coupled_decay,
            grad_clip,
            near_clip: 1.0,
        };
        for id in (0..spec.params.len()).map(ParamId).filter(|id| spec.param(*id).trainable) {
            if around.is_skipped(id)? {
                around.skipped.insert(id);
                around.coupled_decay[id.0] = 0.0;
            }
        }
        Ok(around)
    }

    fn is_skipped(&mut self, id: ParamId) -> Result<bool, TrainError> {
        for rows in blocks(self.spec, id) {
            let [before, after] = self.first_moments(id, rows.clone())?;
            if before != after || self.before.param(id, rows.clone())? != self.after.param(id, rows)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Parameters that the run file freezes, and that changed in the step.
    ///
    /// # Errors
    /// Errors of reading.
    pub(super) fn trained_although_frozen(&mut self) -> Result<Option<Finding>, TrainError> {
        let mut params = Vec::new();
        // The base of adapters, which a checkpoint may lack, is read from the same files on both sides.
        for id in (0..self.spec.params.len()).map(ParamId).filter(|id| !self.spec.param(*id).trainable) {
            for rows in blocks(self.spec, id) {
                if self.before.param(id, rows.clone())? != self.after.param(id, rows)? {
                    params.push(self.spec.param(id).fqn.clone());
                    break;
                }
            }
        }
        let text = format!("{} changed, though the run file freezes it", shown(&params));
        let finding = Finding { cause: Cause::UpdateRule, params, factor: None, explains: 1.0, text };
        Ok((!finding.params.is_empty()).then_some(finding))
    }

    /// Compares rows of a gradient with the one that was used, and calls `visit` with the sums of each row.
    ///
    /// # Errors
    /// Errors of reading.
    pub(super) fn visit(
        &mut self,
        id: ParamId,
        rows: Range<usize>,
        (gradient, clip): (&[f32], f64),
        mut visit: impl FnMut(usize, Sums),
    ) -> Result<(), TrainError> {
        let row_len = self.spec.param(id).row_len().unwrap_or(1);
        let [mut before, mut after] = self.first_moments(id, rows.clone())?;
        // Weights that did not move have their rounding as well.
        if self.skipped.contains(&id) && self.moments.first.is_some() {
            [&mut before, &mut after].iter_mut().for_each(|moments| moments.fill(0.0));
        }
        let params = self.before.param(id, rows.clone())?;
        for (index, row) in rows.enumerate() {
            let mut sums = Sums { clip, ..Sums::default() };
            for at in index * row_len..(index + 1) * row_len {
                let (m, n, p, e) = (before[at], after[at], params[at], f64::from(gradient[at]));
                let u = self.moments.gradient(m, n) - self.coupled_decay[id.0] * p;
                let d = u - clip * e;
                sums.uu += u * u;
                sums.ee += e * e;
                sums.dd += d * d;
                sums.de += d * e;
                sums.dp += d * p;
                sums.ep += e * p;
                sums.pp += p * p;
                sums.pm += p * m;
                sums.mm += m * m;
                sums.mn += m * n;
                sums.nn += n * n;
                sums.em += e * m;
                sums.largest = sums.largest.max(u.abs());
                sums.peak = sums.peak.max(e.abs());
                sums.abs += e.abs();
            }
            visit(row, sums);
        }
        Ok(())
    }

    /// Rows of the gradient that the update used.
    ///
    /// # Errors
    /// Errors of reading.
    pub(super) fn used(&mut self, id: ParamId, rows: Range<usize>) -> Result<Vec<f64>, TrainError> {
        let [before, after] = self.first_moments(id, rows.clone())?;
        if self.skipped.contains(&id) {
            return Ok(vec![0.0; before.len()]);
        }
        let params = self.before.param(id, rows)?;
        let decay = self.coupled_decay[id.0];
        let values = before.iter().zip(&after).zip(&params);
        Ok(values.map(|((m, n), p)| self.moments.gradient(*m, *n) - decay * p).collect())
    }

    /// Rows of the first moment before and after the step.
    pub(super) fn first_moments(
        &mut self,
        id: ParamId,
        rows: Range<usize>,
    ) -> Result<[Vec<f64>; 2], TrainError> {
        let Some(name) = self.moments.first else {
            let mut weights = [self.before.param(id, rows.clone())?, self.after.param(id, rows)?];
            weights.iter_mut().flatten().for_each(|value| *value /= -self.rates[id.0]);
            return Ok(weights);
        };
        Ok([self.before.moment(id, name, rows.clone())?, self.after.moment(id, name, rows)?])
    }

    /// The relative rounding of the first moment before and after the step.
    pub(super) fn first_roundings(&self, id: ParamId) -> [f64; 2] {
        [&self.before, &self.after].map(|state| match self.moments.first {
            Some(name) => state.moment_rounding(id, name),
            None => state.param_rounding(id),
        })
    }
}

/// The error for a gradient of a step that is not finite here.
pub(super) fn not_finite(name: &str) -> TrainError {
    TrainError::Input(format!(
        "the gradient of {name} that the model computes from the state before and the batch is not finite, so there is nothing \
         to compare the used one with"
    ))
}
