//! A checkpoint from which a run may resume, its own or another trainer's.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fmt, fs};

use fsdp_ckpt::native::{MANIFEST_FILE, NativeReader};
use fsdp_ckpt::{is_url, objects};

use super::foreign::Foreign;
use super::table::StateTable;
use crate::error::TrainError;
use crate::job::Job;

/// The checkpoint that a run resumes from.
pub(crate) enum Source {
    /// A checkpoint of `fsdp`.
    Native(Arc<NativeReader>),
    /// A checkpoint of another trainer.
    Foreign(Arc<Foreign>),
}

impl Source {
    /// Opens a checkpoint. It is native if it holds the state of a run, and foreign otherwise.
    pub(crate) fn open<A>(job: &Job<A>, table: &StateTable, path: &Path) -> Result<Self, TrainError> {
        if has_manifest(path)? {
            let reader = NativeReader::open(path)?;
            if !reader.manifest().run_state.is_empty() {
                return Ok(Source::Native(Arc::new(reader)));
            }
        }
        let foreign = Foreign::open(job, table, path)?;
        if foreign.lacks_state() {
            return Err(TrainError::Input(format!(
                "{} has no optimizer state to resume from; to train from its weights, set model.init = \"pretrained\" and \
                 model.path to it, or to the output of `fsdp ckpt convert --to safetensors`",
                path.display()
            )));
        }
        Ok(Source::Foreign(Arc::new(foreign)))
    }
}

/// Resolves the path of a checkpoint.
///
/// # Errors
/// [`TrainError::Input`] if nothing exists there.
pub(crate) fn resolve_path(path: &Path) -> Result<PathBuf, TrainError> {
    let no_checkpoint = |detail: &dyn fmt::Display| {
        TrainError::Input(format!(
            "{} is not the checkpoint of a run: {detail}; give a directory such as runs/a/checkpoints/step-00000050 (`fsdp \
             ckpt inspect` shows what a path holds)",
            path.display()
        ))
    };
    if !is_url(path) {
        return fs::canonicalize(path).map_err(|source| no_checkpoint(&source));
    }
    if objects::names(path)?.is_empty() && objects::version(path)?.is_none() {
        return Err(no_checkpoint(&"no object has this name or prefix"));
    }
    Ok(path.to_owned())
}

/// Whether the path is a directory with the manifest that runs write.
pub(crate) fn has_manifest(path: &Path) -> Result<bool, TrainError> {
    match is_url(path) {
        true => Ok(objects::names(path)?.iter().any(|name| name == MANIFEST_FILE)),
        false => Ok(path.join(MANIFEST_FILE).exists()),
    }
}
