//! What becomes of a run that does not reach its end, as its error says it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fsdp_ckpt::native::{RunDir, RunLock};

use super::run::Log;
use crate::checkpoint::SaveFailure;
use crate::error::TrainError;

/// Where the state of a run is that something beside the computation has ended.
#[derive(Debug)]
pub struct Ending {
    /// Steps done.
    pub done: u64,
    /// Where that state is, or why it could not be saved.
    pub state: Result<Kept, Option<Arc<SaveFailure>>>,
}

/// Where a state was saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kept {
    /// In this checkpoint of the output folder.
    InOutDir(PathBuf),
    /// In this checkpoint in a directory of its own, because the output folder can not be written.
    Elsewhere(PathBuf),
}

impl Ending {
    /// What became of a run that wrote to `out_dir` and was stopped after `done` steps.
    pub(super) fn of(log: &Log, out_dir: &Path, done: u64) -> Self {
        let checkpoints = out_dir.join(RunDir::CHECKPOINTS);
        let kept = |path: &PathBuf| match path.parent() == Some(&checkpoints) {
            true => Kept::InOutDir(path.clone()),
            false => Kept::Elsewhere(path.clone()),
        };
        let saved = log.saved.as_ref().filter(|saved| saved.step == done);
        Self { done, state: saved.map(|saved| kept(&saved.path)).ok_or_else(|| log.not_saved.clone()) }
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { done, state } = self;
        match state {
            Ok(Kept::InOutDir(path)) => write!(
                f,
                "the state after step {done} is in {}: when this is mended, --resume goes on from there, or exports \
                 the model if no step is left",
                path.display()
            ),
            Ok(Kept::Elsewhere(path)) => write!(
                f,
                "run.out_dir can not be written, so the state after step {done} is in {}: go on with --resume-from and \
                 that directory (and --overwrite, or another run.out_dir)",
                path.display()
            ),
            Err(Some(failure)) => write!(f, "{failure}, nor anywhere else"),
            Err(None) => write!(f, "the state after step {done} is lost"),
        }
    }
}

/// From where a run can go on whose loss or state is not finite any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Divergence {
    /// A checkpoint whose weights gave a loss or a gradient that is not finite, and its name from now on.
    pub aside: Option<PathBuf>,
    /// Why it could not be given that name: it is still taken for one to go on from.
    pub not_aside: Option<String>,
    /// The newest checkpoint before it, with the steps that it has done.
    pub newest: Option<(u64, PathBuf)>,
}

impl Divergence {
    /// Sets the checkpoint aside that `error` speaks of, if there is one, and finds the newest of the others. Other errors
    /// are returned as they are, and so are all without the lock of the output folder.
    ///
    /// Loss and gradient of a step are those of the weights of the step before. No learning rate makes them finite, so
    /// a run must go back further.
    pub(super) fn of(error: TrainError, lock: Option<&Arc<RunLock>>) -> TrainError {
        let (TrainError::RankFailed { source, .. }, Some(lock)) = (&error, lock) else { return error };
        let condemned = match **source {
            TrainError::NotFinite { step, .. } | TrainError::LossScale { step, .. } => step - 1,
            // The weights of this step are finite, and give a loss that is not.
            TrainError::EvaluationNotFinite { step, .. } => step,
            // Such a state is never saved.
            TrainError::StateNotFinite { step, .. } => step,
            _ => return error,
        };
        let (aside, not_aside) = match lock.set_aside(condemned, "diverged") {
            Ok(aside) => (aside, None),
            Err(error) => (None, Some(error.to_string())),
        };
        let steps = lock.run().steps().unwrap_or_default();
        let newest = steps.into_iter().rfind(|&step| step < condemned);
        let newest = newest.map(|step| (step, lock.run().checkpoint(step)));
        let divergence = Self { aside, not_aside, newest };
        TrainError::Diverged { source: Box::new(error), divergence }
    }
}

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(aside) = &self.aside {
            write!(f, "the checkpoint of these weights is set aside as {}; ", aside.display())?;
        }
        if let Some(fault) = &self.not_aside {
            write!(f, "the checkpoint of these weights could not be set aside ({fault}): remove it; ")?;
        }
        match &self.newest {
            Some((step, path)) => write!(
                f,
                "with a lower learning rate, --resume goes on from step {step}, the newest checkpoint before ({})",
                path.display()
            ),
            None => f.write_str(
                "there is no earlier checkpoint: begin again with a lower learning rate and --overwrite, and save more \
                 often (checkpoint.every)",
            ),
        }
    }
}
