//! A checkpoint from which a run can resume, its own or another trainer's, and the checks that it can.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fsdp_ckpt::native::{MANIFEST_FILE, NativeReader, RunDir};
use fsdp_ckpt::{is_url, objects};
use fsdp_config::WatchedLoss;
use fsdp_data::DataPosition;

use super::foreign::Foreign;
use super::run_state::{Change, RunState};
use super::start::{Resume, Resumed};
use super::table::StateTable;
use super::warning::RunWarning;
use crate::error::{OptimizerStateError, TrainError};
use crate::job::Job;
use crate::rule::LateParams;
use crate::train::RunOptions;

/// The checkpoint that a run resumes from.
pub(crate) enum Source {
    /// A checkpoint of `fsdp`.
    Native(Arc<NativeReader>),
    /// A checkpoint of another trainer.
    Foreign(Arc<Foreign>),
}

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

impl Source {
    /// Opens a checkpoint. It is native if it holds the state of a run, and foreign otherwise.
    pub(super) fn open<A>(job: &Job<A>, table: &StateTable, path: &Path) -> Result<Self, TrainError> {
        if has_manifest(path)? {
            let reader = NativeReader::open(path)?;
            if !reader.manifest().run_state.is_empty() {
                return Ok(Source::Native(Arc::new(reader)));
            }
        }
        Ok(Source::Foreign(Arc::new(Foreign::open(job, table, path)?)))
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
        return Err(TrainError::NothingLeft { path: chosen.resumed.path, done, steps });
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
        return Err(TrainError::Renamed { path, named, step: saved.step });
    }
    if let Resume::From { at_step: Some(given), .. } = options.resume
        && given != saved.step
    {
        let (counted, tensor) = (saved.step, "the state of the run".to_owned());
        return Err(OptimizerStateError::AtStep { path, counted, given, tensor }.into());
    }
    let now = RunState::of(job, saved.step, options.config_json.as_deref(), (&[], &[]));
    let changes = saved
        .changes_to(&now)
        .map_err(|differences| TrainError::OtherRun { path: path.clone(), differences })?;
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

/// Resolves the path of a checkpoint.
///
/// # Errors
/// [`TrainError::NoCheckpoint`] if nothing exists there.
pub(super) fn resolve_path(path: &Path) -> Result<PathBuf, TrainError> {
    let no_checkpoint = |detail: String| TrainError::NoCheckpoint { path: path.to_owned(), detail };
    if !is_url(path) {
        return fs::canonicalize(path).map_err(|source| no_checkpoint(source.to_string()));
    }
    if objects::names(path)?.is_empty() && objects::version(path)?.is_none() {
        return Err(no_checkpoint("no object has this name or prefix".to_owned()));
    }
    Ok(path.to_owned())
}

/// Whether the path is a directory with the manifest that runs write.
pub(super) fn has_manifest(path: &Path) -> Result<bool, TrainError> {
    match is_url(path) {
        true => Ok(objects::names(path)?.iter().any(|name| name == MANIFEST_FILE)),
        false => Ok(path.join(MANIFEST_FILE).exists()),
    }
}
