//! Computes steps with faults planted.

use fsdp_core::DType;
use fsdp_nn::model::Architecture;

use super::{Judge, search};
use crate::audit::report::{Cause, Finding, number};
use crate::audit::sums::total;
use crate::audit::sweep::tied;
use crate::audit::trial::{self, Family, Trial};
use crate::audit::variant::Between;
use crate::error::TrainError;

/// The same for a fault that leaves the length of the gradient open, and so fits more easily.
const FREE_EXPLAINED_MIN: f64 = 0.999;

/// No other fault is tried after one that is within the bound and explains so much.
const SURE_MIN: f64 = 0.99;

/// Another size is looked for if one leaves less than the whole difference, or seems to. Each further one has to leave at most
/// so much of that.
const PROGRESS: f64 = 0.8;

/// Sizes that are tried besides the likely ones.
const SIZES_MAX: usize = 12;

/// The relative difference from which a factor of all is mentioned.
const FACTOR_MIN: f64 = 2e-3;

/// What a fault has to explain.
pub(super) struct Wrong<'b> {
    /// The differences that precision alone may make.
    pub(super) bounds: &'b [f64],
    /// The squared distance between the used gradient and the expected one.
    pub(super) distance2: f64,
    /// The largest absolute value of an element of the used gradient.
    pub(super) largest: f64,
}

/// A fault that was tried.
pub(super) struct Tried {
    pub(super) finding: Finding,
    /// Factors of its gradient, if only both together explain the used one.
    pub(super) beside: Vec<Finding>,
    /// Whether it leaves nothing that precision shows.
    is_all: bool,
    distance2: f64,
}

impl Tried {
    /// Whether this is what happened: two faults are, if no single one is.
    pub(super) fn is_sure(&self) -> bool {
        self.is_all && self.beside.is_empty() && self.finding.explains >= SURE_MIN
    }

    /// Of two faults the one that explains more.
    fn or(self, other: Option<Tried>) -> Tried {
        match other {
            Some(other) if !self.is_sure() && other.finding.explains >= self.finding.explains => other,
            _ => self,
        }
    }
}

impl<A: Architecture + Clone> Judge<'_, A> {
    /// Computes the steps with errors planted, until one explains everything; otherwise the best.
    pub(super) fn best_trial(
        &mut self,
        wrong: &Wrong<'_>,
        best: Option<Tried>,
    ) -> Result<Option<Tried>, TrainError> {
        let is_tied = !tied(self.spec).is_empty();
        let (sound, settings) = (self.sound.clone(), self.settings);
        let families = trial::all(&sound, self.batches, settings, is_tied, wrong.largest);
        let mut best = best;
        for (index, family) in families.iter().enumerate() {
            (self.progress)(&format!("trying fault {} of {}", index + 1, families.len()));
            if let Some(tried) = self.best_size(family, wrong)? {
                best = Some(tried.or(best));
            }
            if best.as_ref().is_some_and(Tried::is_sure) {
                break;
            }
        }
        Ok(best)
    }

    /// Tries the sizes of a fault: the likely ones, and then those towards which the distance falls.
    fn best_size(&mut self, family: &Family<'_, A>, wrong: &Wrong<'_>) -> Result<Option<Tried>, TrainError> {
        let place = |size: f64| if family.between == Between::Logarithmic { size.ln() } else { size };
        let mut known: Vec<[f64; 2]> =
            family.stated.iter().map(|size| [place(*size), wrong.distance2]).collect();
        let mut best: Option<Tried> = None;
        let mut promising = wrong.distance2;
        for index in 0..family.sizes.len() + SIZES_MAX {
            let size = match family.sizes.get(index) {
                Some(size) => *size,
                None => {
                    let found = if family.between == Between::Nothing {
                        None
                    } else {
                        search::next(&known, promising)
                    };
                    let Some(place) = found else { break };
                    promising *= PROGRESS;
                    if family.between == Between::Logarithmic { place.exp() } else { place }
                }
            };
            let Some(trial) = (family.trial)(size) else { continue };
            let Some(tried) = self.tried(&trial, wrong)? else { continue };
            known.push([place(size), tried.distance2]);
            // A size that was followed fits more easily, too.
            let is_likely = index < family.sizes.len();
            if is_likely || tried.is_all || tried.finding.explains >= FREE_EXPLAINED_MIN {
                let is_sure = tried.is_sure();
                best = Some(tried.or(best));
                if is_sure {
                    break;
                }
            }
        }
        Ok(best)
    }

    /// Computes a step with a fault; `None` if the fault leaves the length of the gradient open, and the gradient does not
    /// even point where it should.
    pub(super) fn tried(&mut self, trial: &Trial<A>, wrong: &Wrong<'_>) -> Result<Option<Tried>, TrainError> {
        // Errors of `f32` are far below the bounds.
        let found = self.measure(trial, DType::F32, &[])?.sums;
        let compared = self.compared(&found, wrong.bounds);
        let expected = compared.clip();
        let is_free = trial.has_free_factor && !compared.outside(expected).is_empty();
        let factor = if is_free { total(&found).factor().unwrap_or(0.0) } else { expected };
        let mut distance2 = compared.distance2(factor);
        let mut is_all = compared.outside(factor).is_empty();
        let mut beside =
            if self.is_exact() && !is_all { compared.explained().unwrap_or_default() } else { Vec::new() };
        if let Some(second) = beside.first() {
            distance2 = (1.0 - second.explains) * compared.distance2(expected);
            is_all = true;
        }
        let explains = 1.0 - distance2 / wrong.distance2;
        beside.iter_mut().for_each(|second| second.explains = explains);
        if is_free && explains < FREE_EXPLAINED_MIN && !is_all {
            return Ok(None);
        }
        let mut text = trial.text.clone();
        if trial.says_length && beside.is_empty() && (factor / expected - 1.0).abs() > FACTOR_MIN {
            text += &format!("; the gradient is {} times that", number(factor / expected));
        }
        let params = match trial.cause {
            Cause::TiedGradientMissing => tied(self.spec).iter().map(|id| id.0).collect(),
            _ => Vec::new(),
        };
        let params = compared.names(&params);
        let finding = Finding { cause: trial.cause, params, factor: trial.factor, explains, text };
        Ok(Some(Tried { finding, beside, is_all, distance2 }))
    }
}
