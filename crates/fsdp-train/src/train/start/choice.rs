//! The checks that a run can resume from a checkpoint.

use std::collections::BTreeSet;
use std::sync::Arc;

use fsdp_ckpt::native::{NativeReader, RunDir};
use fsdp_config::WatchedLoss;
use fsdp_data::DataPosition;

use crate::checkpoint::{Change, Foreign, RunState, Source, StateTable, other_count, other_run};
use crate::error::TrainError;
use crate::job::Job;
use crate::rule::LateParams;
use crate::train::options::{Resume, Resumed, RunOptions};
use crate::train::warning::RunWarning;

/// A checkpoint that has passed all checks.
pub(super) struct Chosen {
    pub(super) source: Source,
    /// Changes recorded before this start.
    pub(super) earlier: Vec<Change>,
    /// The watched losses so far.
    pub(super) watched: Vec<WatchedLoss>,
    /// The parameters that began later than the run.
    pub(super) late: LateParams,
    /// Those of them of which another trainer's optimizer had no state.
    pub(super) fresh: BTreeSet<String>,
    pub(super) resumed: Resumed,
}

impl Chosen {
    /// The warning that another trainer's optimizer had not counted all steps for some parameters.
    pub(super) fn warning(&self) -> Option<RunWarning> {
        let is_first = matches!(self.source, Source::Foreign(_)) && !self.late.is_empty();
        let (path, step) = (self.resumed.path.clone(), self.resumed.step);
        let (late, fresh) = (self.late.clone(), self.fresh.clone());
        is_first.then_some(RunWarning::LateParams { path, step, late, fresh })
    }
}

/// Checks that the run can resume from a checkpoint.
pub(super) fn choose<A>(
    job: &Job<A>,
    table: &StateTable,
    options: &RunOptions<'_>,
    source: Source,
) -> Result<Chosen, TrainError> {
    let chosen = match source {
        Source::Native(reader) => choose_native(job, table, options, reader)?,
        Source::Foreign(foreign) => choose_foreign(job, options, foreign)?,
    };
    let (done, steps) = (chosen.resumed.step, job.config.train.steps);
    if done > steps {
        return Err(TrainError::Input(format!(
            "{} has done {done} steps, and train.steps is {steps}; extend the run with --set train.steps=N, or continue from \
             an older checkpoint with --resume-from",
            chosen.resumed.path.display()
        )));
    }
    Ok(chosen)
}

fn choose_native<A>(
    job: &Job<A>,
    table: &StateTable,
    options: &RunOptions<'_>,
    reader: Arc<NativeReader>,
) -> Result<Chosen, TrainError> {
    let path = reader.dir().to_owned();
    let saved = RunState::read(&reader)?;
    if let Some(named) = RunDir::step_named(&path).filter(|&named| named != saved.step) {
        let step = saved.step;
        return Err(TrainError::Input(format!(
            "{} is named after step {named} but holds the state after step {step}: it was renamed. Rename it back to {}, or \
             move it away",
            path.display(),
            RunDir::name_of(step)
        )));
    }
    if let Resume::From { at_step: Some(given), .. } = options.resume
        && given != saved.step
    {
        return Err(other_count(&path, given, ("the state of the run", saved.step)));
    }
    let now = RunState::of(job, saved.step, options.config_json.as_deref(), (&[], &[]));
    let changes = saved.changes_to(&now).map_err(|differences| other_run(&path, &differences))?;
    reader.check_tensors(table.tensors.iter().map(|tensor| &tensor.spec))?;
    let resumed = Resumed { step: saved.step, path, changes, taken: None };
    let (earlier, watched, late) = (saved.changes, saved.watched, saved.late);
    Ok(Chosen { source: Source::Native(reader), earlier, watched, late, fresh: BTreeSet::new(), resumed })
}

fn choose_foreign<A>(
    job: &Job<A>,
    options: &RunOptions<'_>,
    foreign: Arc<Foreign>,
) -> Result<Chosen, TrainError> {
    let at_step = match options.resume {
        Resume::From { at_step, .. } => at_step,
        _ => None,
    };
    let mut summary = foreign.summary(job);
    let (step, late) = foreign.steps(job, at_step, options.stop, &mut summary)?;
    let DataPosition { epoch, step_in_epoch, .. } = job.data.position(step);
    summary.derived.push(format!("position in data.train: epoch {epoch}, step {step_in_epoch} of it"));
    summary.derived.push(format!("learning rate of the next step: {}", job.schedule.lr(step)));
    let changes = foreign.changes(job, step)?;
    let resumed = Resumed { step, path: foreign.path().to_owned(), changes, taken: Some(summary) };
    let (earlier, watched, fresh) = (Vec::new(), Vec::new(), foreign.fresh(job).map(str::to_owned).collect());
    Ok(Chosen { source: Source::Foreign(foreign), earlier, watched, late, fresh, resumed })
}
