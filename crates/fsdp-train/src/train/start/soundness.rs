//! Finds out whether checkpoints can be read completely, and handles those that cannot.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use fsdp_ckpt::native::RunDir;
use fsdp_ckpt::transfer::{NoProgress, Options};
use fsdp_ckpt::{Error, formats, verify};

use crate::error::TrainError;
use crate::train::options::RunOptions;
use crate::train::warning::RunWarning;

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
/// [`TrainError::Input`] if none can; [`TrainError::Checkpoint`], [`TrainError::Stopped`].
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
    Err(TrainError::Input(format!(
        "none of the {} checkpoints in {} can be read completely; restore one from a copy, or pass --overwrite to start over",
        unsound.len(),
        run.checkpoints().display()
    )))
}

/// The error for a damaged checkpoint of a run; it names the newest older one that can be read completely.
pub(super) fn damaged(run: &RunDir, step: u64, fault: &Error, stop: &AtomicBool) -> TrainError {
    let path = run.checkpoint(step);
    let older = match run.steps() {
        Ok(steps) => steps.into_iter().rev().filter(|&older| older < step).map(|older| run.checkpoint(older)),
        Err(error) => return error.into(),
    };
    let mut advice =
        "No older one is sound: restore one from a copy, or pass --overwrite to start over".to_owned();
    for older in older {
        match read_all(&older, stop) {
            Ok(()) => {
                let sound = older.display();
                advice = format!(
                    "The newest sound one is {sound}: resume from it with --resume --skip-unsound (damaged ones are kept, \
                     under names that end in .unsound), or with --resume-from {sound} --overwrite (later ones are removed)"
                );
                break;
            }
            Err(error @ Error::Canceled) => return stopped_if_canceled(error),
            Err(_) => {}
        }
    }
    TrainError::Input(format!("{} is damaged: {fault}. {advice}", path.display()))
}

fn stopped_if_canceled(error: Error) -> TrainError {
    match error {
        Error::Canceled => TrainError::Stopped,
        error => error.into(),
    }
}
