//! Both states, and the steps between them.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use fsdp_core::model::ParamId;

use crate::checkpoint::{Foreign, ImportSummary, StateTable};
use crate::error::TrainError;
use crate::job::Job;
use crate::rule;

/// No run has done more steps. Some of what is computed takes longer with more.
pub(super) const STEPS_MAX: u64 = 1 << 27;

/// How many steps were done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Counts {
    /// Before the judged ones.
    pub(super) before: u64,
    /// Number of the last step among the steps of each trained parameter, from 1.
    pub(super) own_steps: BTreeMap<ParamId, u64>,
    /// The steps of each trained parameter before these.
    pub(super) own_before: BTreeMap<ParamId, u64>,
}

/// The steps done in the first of two states that have to be so many steps apart, if `at_step` does not contradict them.
///
/// # Errors
/// [`TrainError::Input`] if they are not; errors of checkpoints that cannot be read or do not fit the model.
pub fn steps_done<A>(
    job: &Job<A>,
    paths: [&Path; 2],
    at_step: Option<u64>,
    steps: usize,
) -> Result<u64, TrainError> {
    let [before, after] = open(job, paths)?;
    Ok(Counts::of(job, [&before, &after], at_step, steps, &AtomicBool::new(false))?.before)
}

/// Opens both states.
///
/// # Errors
/// Errors of checkpoints that cannot be read or do not fit the model.
pub(super) fn open<A>(job: &Job<A>, [before, after]: [&Path; 2]) -> Result<[Foreign; 2], TrainError> {
    let rule = rule::rule(&job.config.train, &job.plan.spec)?;
    let table = StateTable::new(&job.plan, &rule);
    Ok([open_one(job, &table, before)?, open_one(job, &table, after)?])
}

/// Opens a state.
///
/// # Errors
/// [`TrainError::Input`] if it is not that of an optimizer; errors of checkpoints that cannot be read or do not fit the model.
pub(super) fn open_one<A>(job: &Job<A>, table: &StateTable, path: &Path) -> Result<Foreign, TrainError> {
    let foreign = Foreign::open(job, table, path)?;
    if foreign.lacks_state() {
        return Err(TrainError::Input(format!(
            "{} has no state of an optimizer, and only its moments contain the gradient that was used: save the optimizer \
             together with the model, before the step and after it",
            path.display()
        )));
    }
    Ok(foreign)
}

impl Counts {
    /// # Errors
    /// [`TrainError::Input`] for states that are not `steps` apart, or too far from the start; errors of counts that cannot
    /// be read or contradict `at_step`.
    pub(super) fn of<A>(
        job: &Job<A>,
        [before, after]: [&Foreign; 2],
        at_step: Option<u64>,
        steps: usize,
        stop: &AtomicBool,
    ) -> Result<Self, TrainError> {
        let possible = |steps: u64| match steps {
            0..=STEPS_MAX => Ok(steps),
            _ => Err(TrainError::Input(format!(
                "{steps} steps are more than any run does ({STEPS_MAX} at most): check --at-step, --steps and the step counts \
                 of the states"
            ))),
        };
        let between = possible(steps as u64)?;
        let at_step = at_step.map(possible).transpose()?;
        let mut summary = ImportSummary::default();
        let (before_steps, early) = before.steps(job, at_step, stop, &mut summary)?;
        let end = possible(before_steps)? + between;
        let (after_steps, late) = after.steps(job, at_step.map(|step| step + between), stop, &mut summary)?;
        if end != after_steps {
            return Err(TrainError::Input(format!(
                "{} has done {before_steps} steps and {} has done {after_steps}, expected {steps} more: an audit needs two \
                 states one step apart, saved by one run (save after every step, for two steps); of states further apart, \
                 --steps N judges the whole update, given the micro-batches of all N steps",
                before.path().display(),
                after.path().display()
            )));
        }
        let own = |steps: u64, late: &BTreeMap<String, u64>| {
            let params = job.plan.spec.params.iter().enumerate().filter(|(_, param)| param.trainable);
            let own = |fqn: &str| steps.saturating_sub(late.get(fqn).copied().unwrap_or(0));
            params.map(|(index, param)| (ParamId(index), own(&param.fqn))).collect()
        };
        Ok(Self {
            before: before_steps,
            own_before: own(before_steps, &early),
            own_steps: own(after_steps, &late),
        })
    }
}
