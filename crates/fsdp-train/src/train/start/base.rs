//! Where the base of adapters is: runs that continue another trainer's checkpoint may read it from there.

use std::path::{Path, PathBuf};

use fsdp_ckpt::native::{NativeReader, RunDir};

use crate::checkpoint::{RunState, has_manifest, resolve_path};
use crate::error::TrainError;
use crate::train::options::Resume;

/// The checkpoint of another trainer that may hold the base of the adapters of a run: the one from which it resumes, or
/// from which an earlier run began. `None` if there is no such checkpoint.
///
/// # Errors
/// [`TrainError::Input`] if nothing exists at the path to resume from; [`TrainError::Checkpoint`] for one that
/// cannot be read.
pub fn base_of(resume: &Resume, out_dir: &Path) -> Result<Option<PathBuf>, TrainError> {
    match resume {
        Resume::Fresh => Ok(None),
        Resume::From { path, .. } => {
            let path = resolve_path(path)?;
            if !has_manifest(&path)? {
                return Ok(Some(path));
            }
            let reader = NativeReader::open(&path)?;
            match reader.manifest().run_state.is_empty() {
                true => Ok(Some(path)),
                false => Ok(RunState::read(&reader)?.base_from),
            }
        }
        Resume::Newest | Resume::NewestSound => {
            let run = RunDir::new(out_dir);
            // Damage is reported when the run chooses its checkpoint.
            let read = |step: u64| RunState::read(&NativeReader::open(run.checkpoint(step)).ok()?).ok();
            let steps = run.steps().unwrap_or_default();
            Ok(steps.into_iter().rev().find_map(read).and_then(|state| state.base_from))
        }
    }
}
