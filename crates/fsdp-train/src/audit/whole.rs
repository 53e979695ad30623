//! Judges several steps as a whole.
//!
//! Without the states between them, the gradients of single steps are unknown. So the steps are done here, from the state
//! before the first of them, and what they change is compared with what the program has changed: of weights and of moments.

mod steps;

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;

use fsdp_ckpt::safetensors::TensorType;
use fsdp_config::OptimizerConfig;
use fsdp_core::model::ParamId;
use fsdp_nn::model::Architecture;
use fsdp_nn::update::GroupSettings;

use super::batch::MicroBatch;
use super::gradient::{OTHER_KERNELS, rows};
use super::moments::Moments;
use super::report::{Cause, Finding, GradientRow, kind_of, number, shown};
use super::state::{Held, State, WEIGHT, blocks, rounding};
use super::sums::{Around, Sums, not_finite};
use super::update::{ROUNDINGS, SECOND};
use crate::error::TrainError;
use crate::job::Job;

/// Samples of rounding errors before something is found.
const SAMPLES: usize = 4;

/// Several steps, as they should be.
pub(super) struct Whole<'a, A> {
    pub(super) job: &'a Job<A>,
    pub(super) threads: usize,
    pub(super) stop: &'a AtomicBool,
    /// The micro-batches of each step.
    pub(super) steps: &'a [Vec<MicroBatch>],
    /// The steps done before.
    pub(super) first: u64,
    /// Number of the last step among the steps of each trained parameter, from 1.
    pub(super) own_steps: BTreeMap<ParamId, u64>,
    /// The steps of each trained parameter before these.
    pub(super) own_before: BTreeMap<ParamId, u64>,
    /// Settings of each trained parameter.
    pub(super) settings: BTreeMap<ParamId, GroupSettings>,
    pub(super) progress: &'a dyn Fn(&str),
}

/// What was found of the steps.
pub(super) struct Judged {
    pub(super) findings: Vec<Finding>,
    /// Of kinds of weights and moments, and of each.
    pub(super) rows: [Vec<GradientRow>; 2],
}

/// How a weight or a moment has changed, beside how it should have (`e`).
struct Change {
    param: ParamId,
    name: String,
    sums: Sums,
    bound: f64,
}

impl Change {
    fn is_outside(&self) -> bool {
        self.sums.distance2(1.0).sqrt() > self.bound
    }
}

impl<A: Architecture + Clone> Whole<'_, A> {
    /// Does the steps, in the dtype of the run and in a wider one, and compares the states.
    ///
    /// Steps may amplify an error again and again, and most in one direction, of which one sample of rounding errors may have
    /// little. So before anything is found, there are more samples.
    ///
    /// # Errors
    /// Errors of the model and of reading; [`TrainError::Stopped`].
    pub(super) fn judge(&self, around: &mut Around<'_>) -> Result<Judged, TrainError> {
        let mut changes = self.changes(around, 0)?;
        for sample in 1..SAMPLES {
            if !changes.iter().any(Change::is_outside) {
                break;
            }
            let others = self.changes(around, sample)?;
            changes
                .iter_mut()
                .zip(others)
                .for_each(|(change, other)| change.bound = change.bound.max(other.bound));
        }
        let named = |name_of: fn(&str) -> String| {
            rows(changes.iter().map(|change| (name_of(&change.name), change.sums, change.bound)), 1.0)
        };
        Ok(Judged { findings: self.findings(&changes), rows: [named(kind_of), named(str::to_owned)] })
    }

    /// How weights and moments have changed, beside a sample of rounding errors.
    fn changes(&self, around: &mut Around<'_>, sample: usize) -> Result<Vec<Change>, TrainError> {
        let [own, exact] = self.run(around, sample)?;
        let mut changes = Vec::new();
        for id in self.settings.keys().copied() {
            for state in self.states() {
                changes.push(self.change(
                    id,
                    state,
                    [&mut around.before, &mut around.after],
                    [&own, &exact],
                )?);
            }
        }
        let finite = |change: &&Change| !(change.sums.uu + change.sums.ee).is_finite();
        if let Some(change) = changes.iter().find(finite) {
            return Err(not_finite(&self.job.plan.spec.param(change.param).fqn));
        }
        Ok(changes)
    }

    /// The weight, and the moments of the rule.
    fn states(&self) -> impl Iterator<Item = &'static str> {
        let optimizer = &self.job.config.train.optimizer;
        let first = Moments::of(optimizer, self.first).and_then(|moments| moments.first);
        let second = matches!(optimizer, OptimizerConfig::Adamw(_)).then_some(SECOND);
        [WEIGHT].into_iter().chain(first).chain(second)
    }

    /// How a weight or moment has changed, and how far precision may have moved it.
    fn change(
        &self,
        id: ParamId,
        state: &'static str,
        [before, after]: [&mut State<'_>; 2],
        [own, exact]: [&Held; 2],
    ) -> Result<Change, TrainError> {
        let spec = &self.job.plan.spec;
        let row_len = spec.param(id).row_len().unwrap_or(1);
        let mut sums = Sums { clip: 1.0, ..Sums::default() };
        let (mut noise2, mut size2) = (0.0, 0.0);
        for rows in blocks(spec, id) {
            let elements = rows.start * row_len..rows.end * row_len;
            let [own, exact] = [own, exact].map(|held| &held[&(id, state)][elements.clone()]);
            let old = read(before, id, state, rows.clone())?;
            let new = read(after, id, state, rows)?;
            for at in 0..old.len() {
                let (e, u) = (exact[at] - old[at], new[at] - old[at]);
                let d = new[at] - exact[at];
                sums.ee += e * e;
                sums.uu += u * u;
                sums.de += d * e;
                sums.dd += d * d;
                noise2 += (own[at] - exact[at]).powi(2);
                size2 += new[at].abs().max(old[at].abs()).powi(2);
            }
        }
        let unit = rounding(dtype_of(after, id, state));
        let bound = OTHER_KERNELS * f64::sqrt(noise2) + ROUNDINGS * unit * f64::sqrt(size2);
        let name = spec.param(id).fqn.clone();
        let name = if state == WEIGHT { name } else { format!("{state} of {name}") };
        Ok(Change { param: id, name, sums, bound })
    }

    /// What differs. Which step or which part of it is wrong cannot be said, except for parameters that did not change at all.
    fn findings(&self, changes: &[Change]) -> Vec<Finding> {
        let spec = &self.job.plan.spec;
        let mut outside: Vec<&Change> = changes.iter().filter(|change| change.is_outside()).collect();
        if outside.is_empty() {
            return Vec::new();
        }
        let steps = self.steps.len();
        let left = |change: &&Change| change.sums.distance2(1.0).sqrt() / change.bound;
        outside.sort_by(|a, b| left(b).total_cmp(&left(a)));
        let is_still = |id: ParamId| {
            changes.iter().filter(|change| change.param == id).all(|change| change.sums.uu == 0.0)
        };
        let mut still: Vec<ParamId> =
            outside.iter().map(|change| change.param).filter(|id| is_still(*id)).collect();
        still.sort_unstable();
        still.dedup();
        let names =
            |ids: &[ParamId]| -> Vec<String> { ids.iter().map(|id| spec.param(*id).fqn.clone()).collect() };
        if !still.is_empty() {
            let params = names(&still);
            let text = format!(
                "{} did not change in {steps} steps, nor did the optimizer's state: got no gradient, or is not trained",
                shown(&params)
            );
            return vec![Finding {
                cause: Cause::GradientMissing,
                params,
                factor: Some(0.0),
                explains: 1.0,
                text,
            }];
        }
        let first = outside[0];
        let largest: Vec<String> = outside.iter().map(|change| change.name.clone()).collect();
        let text = format!(
            "after {steps} steps, {} of {} weights and moments are not where the run file leads, most {} (the first changed by {} \
             times what was expected, cosine {}); only the whole update of {steps} steps can be judged: two states one step apart \
             would show the cause",
            outside.len(),
            changes.len(),
            shown(&largest),
            first.sums.factor().map_or("infinitely many".to_owned(), number),
            first.sums.cosine().map_or("undefined".to_owned(), number)
        );
        let mut ids: Vec<ParamId> = outside.iter().map(|change| change.param).collect();
        ids.sort_unstable();
        ids.dedup();
        vec![Finding { cause: Cause::Unexplained, params: names(&ids), factor: None, explains: 0.0, text }]
    }
}

fn dtype_of(state: &State<'_>, id: ParamId, name: &str) -> TensorType {
    if name == WEIGHT { state.param_dtype(id) } else { state.moment_dtype(id, name) }
}

fn read(
    state: &mut State<'_>,
    id: ParamId,
    name: &'static str,
    rows: std::ops::Range<usize>,
) -> Result<Vec<f64>, TrainError> {
    if name == WEIGHT { state.param(id, rows) } else { state.moment(id, name, rows) }
}
