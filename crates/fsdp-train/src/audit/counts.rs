//! Both states, and the steps between them.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use fsdp_core::model::ParamId;

use super::AuditError;
use crate::checkpoint::{Foreign, ImportSummary, StateTable};
use crate::error::{OptimizerStateError, TrainError};
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
/// [`AuditError::Steps`]; errors of checkpoints that cannot be read or do not fit the model.
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
    let open = |path| {
        Foreign::open(job, &table, path).map_err(|error| match error {
            TrainError::OptimizerState(OptimizerStateError::Missing { path }) => {
                AuditError::NoState { path }.into()
            }
            error => error,
        })
    };
    Ok([open(before)?, open(after)?])
}

impl Counts {
    /// # Errors
    /// [`AuditError::Steps`], [`AuditError::TooManySteps`]; errors of counts that cannot be read or contradict `at_step`.
    pub(super) fn of<A>(
        job: &Job<A>,
        [before, after]: [&Foreign; 2],
        at_step: Option<u64>,
        steps: usize,
        stop: &AtomicBool,
    ) -> Result<Self, TrainError> {
        let possible = |steps: u64| match steps {
            0..=STEPS_MAX => Ok(steps),
            _ => Err(TrainError::from(AuditError::TooManySteps { steps })),
        };
        let between = possible(steps as u64)?;
        let at_step = at_step.map(possible).transpose()?;
        let mut summary = ImportSummary::default();
        let (before_steps, early) = before.steps(job, at_step, stop, &mut summary)?;
        let end = possible(before_steps)? + between;
        let (after_steps, late) = after.steps(job, at_step.map(|step| step + between), stop, &mut summary)?;
        if end != after_steps {
            let [before, after] = [before, after].map(|state| state.path().to_owned());
            return Err(AuditError::Steps { before, before_steps, after, after_steps, steps }.into());
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
