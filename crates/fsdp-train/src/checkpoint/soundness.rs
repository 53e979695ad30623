//! Finds out whether checkpoints can be read completely, and handles those that cannot.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use fsdp_ckpt::native::RunDir;
use fsdp_ckpt::transfer::{NoProgress, Options};
use fsdp_ckpt::{Error, formats, verify};

use super::warning::RunWarning;
use crate::error::TrainError;
use crate::train::RunOptions;

/// The device cannot read what it has stored.
const EIO: i32 = 5;

/// Reads a whole checkpoint and verifies its checksums. `stop` ends it early.
///
/// # Errors
/// The first problem found.
pub(super) fn read_all(path: &Path, stop: &AtomicBool) -> Result<(), Error> {
    let checkpoint = formats::native::open(path)?;
    let found = verify::verify(&checkpoint, &Options::new(&NoProgress, stop))?;
    found.problems.into_iter().next().map_or(Ok(()), Err)
}

/// Whether a read error is due to the checkpoint itself, so that another one may work. Missing permissions, a network
/// failure or a newer format version are not.
pub(super) fn is_damage(error: &Error) -> bool {
    use std::io::ErrorKind::{IsADirectory, NotADirectory, NotFound, UnexpectedEof};
    match error {
        Error::Io { cause, .. } => {
            matches!(cause.kind(), NotFound | UnexpectedEof | IsADirectory | NotADirectory)
                || cause.raw_os_error() == Some(EIO)
        }
        Error::Malformed { .. } | Error::NotWhole { .. } => true,
        Error::Several { problems } => problems.iter().all(is_damage),
        _ => false,
    }
}

/// Returns the newest checkpoint that can be read completely, and the steps of newer ones that cannot, newest first.
/// `None` if there are no checkpoints.
///
/// # Errors
/// [`TrainError::NoSoundCheckpoint`], [`TrainError::Checkpoint`], [`TrainError::Stopped`].
pub(super) fn newest_sound(
    run: &RunDir,
    options: &RunOptions<'_>,
) -> Result<Option<(PathBuf, Vec<u64>)>, TrainError> {
    let mut unsound = Vec::new();
    for step in run.steps()?.into_iter().rev() {
        let path = run.checkpoint(step);
        match read_all(&path, options.stop) {
            Ok(()) => return Ok(Some((path, unsound))),
            Err(error) if is_damage(&error) => {
                options.reporter.warn(&RunWarning::PassedOver { path, fault: error.to_string() });
                unsound.push(step);
            }
            Err(error) => return Err(stopped_if_canceled(error)),
        }
    }
    if unsound.is_empty() {
        return Ok(None);
    }
    Err(TrainError::NoSoundCheckpoint { dir: run.checkpoints().to_owned(), count: unsound.len() })
}

/// The error for a damaged checkpoint of a run; it names the newest older one that can be read completely.
pub(super) fn damaged(run: &RunDir, step: u64, fault: Error, stop: &AtomicBool) -> TrainError {
    let path = run.checkpoint(step);
    let older = match run.steps() {
        Ok(steps) => steps.into_iter().rev().filter(|&older| older < step).map(|older| run.checkpoint(older)),
        Err(error) => return error.into(),
    };
    let mut sound = None;
    for older in older {
        match read_all(&older, stop) {
            Ok(()) => {
                sound = Some(older);
                break;
            }
            Err(error @ Error::Canceled) => return stopped_if_canceled(error),
            Err(_) => {}
        }
    }
    TrainError::Damaged { path, fault: Box::new(fault), sound }
}

fn stopped_if_canceled(error: Error) -> TrainError {
    match error {
        Error::Canceled => TrainError::Stopped,
        error => error.into(),
    }
}
