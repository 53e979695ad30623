//! What happened to the state of a run that did not complete, as part of its error.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fsdp_ckpt::native::{RunDir, RunLock};

use super::run::Log;
use crate::checkpoint::SaveFailure;
use crate::error::TrainError;

/// The state of a run that was ended by a failure outside the computation.
#[derive(Debug)]
pub struct Ending {
    /// Steps done.
    pub done: u64,
    /// Where the state was saved, or why it could not be saved; `None` if no failed save was recorded.
    pub state: Result<Kept, Option<Arc<SaveFailure>>>,
}

/// The location of a saved state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kept {
    /// This checkpoint in the output folder.
    InOutDir(PathBuf),
    /// This checkpoint in a separate directory, because the output folder cannot be written.
    Elsewhere(PathBuf),
}

impl Ending {
    /// Describes a run that writes to `out_dir` and was stopped after `done` steps.
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
                "the state after step {done} is in {}: once this is fixed, --resume continues from there, or \
                 exports the model if no steps are left",
                path.display()
            ),
            Ok(Kept::Elsewhere(path)) => write!(
                f,
                "run.out_dir cannot be written, so the state after step {done} is in {}: resume with \
                 --resume-from and that directory (and --overwrite, or another run.out_dir)",
                path.display()
            ),
            Err(Some(failure)) => write!(f, "{failure}; nor could it be saved elsewhere"),
            Err(None) => write!(f, "the state after step {done} is lost"),
        }
    }
}

/// Where a run can resume after its loss or state has become non-finite.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Divergence {
    /// The new name of the checkpoint whose weights gave a non-finite loss or gradient; `None` if there is no such
    /// checkpoint.
    pub aside: Option<PathBuf>,
    /// Why that checkpoint could not be renamed: a run would still resume from it.
    pub not_aside: Option<String>,
    /// The newest checkpoint before it, with its number of steps.
    pub newest: Option<(u64, PathBuf)>,
}

impl Divergence {
    /// Sets aside the checkpoint that `error` condemns, if there is one, and finds the newest checkpoint before it.
    /// Returns other errors unchanged, and every error if there is no lock of the output folder.
    ///
    /// Loss and gradient of a step are computed from the weights of the previous step. No learning rate makes them
    /// finite, so a run must go back further.
    pub(super) fn of(error: TrainError, lock: Option<&Arc<RunLock>>) -> TrainError {
        let (TrainError::RankFailed { source, .. }, Some(lock)) = (&error, lock) else { return error };
        let diverged_step = match **source {
            TrainError::NotFinite { step, .. } | TrainError::LossScale { step, .. } => step - 1,
            // The weights of this step are finite, but their loss is not.
            TrainError::EvaluationNotFinite { step, .. } => step,
            // Such a state is never saved.
            TrainError::StateNotFinite { step, .. } => step,
            _ => return error,
        };
        let (aside, not_aside) = match lock.set_aside(diverged_step, "diverged") {
            Ok(aside) => (aside, None),
            Err(error) => (None, Some(error.to_string())),
        };
        let steps = lock.run().steps().unwrap_or_default();
        let newest = steps.into_iter().rfind(|&step| step < diverged_step);
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
                "with a lower learning rate, --resume continues from step {step}, the newest earlier \
                 checkpoint ({})",
                path.display()
            ),
            None => f.write_str(
                "there is no earlier checkpoint: start over with a lower learning rate and --overwrite, and \
                 save more often (checkpoint.every)",
            ),
        }
    }
}
