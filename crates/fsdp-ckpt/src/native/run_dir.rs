//! The directory of a run: the location of its checkpoints, the right to change them, and which of them are kept.
//!
//! A checkpoint is complete when it has its manifest. On a disk it gets its final name last and loses it first: to be
//! deleted, it is renamed to a name that is not a checkpoint's. An interruption therefore never leaves an incomplete
//! checkpoint that looks complete. All checkpoints are cleared in one step too, by renaming their directory. For stores
//! without renaming, see `objects`.

use std::{
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

use super::{Attempt, MANIFEST_FILE};
use crate::{
    error::Error,
    file_io::{Files, Locked, PathFile},
    files::FileKind,
};

/// The output directory of a run. Reading it needs no lock.
#[derive(Clone, Debug)]
pub struct RunDir {
    pub(super) files: Files,
    out_dir: PathBuf,
    checkpoints: PathBuf,
}

/// The right to change the checkpoints of a run, held by one process at a time: the process of rank 0.
///
/// The operating system releases the lock when the process ends, however it ends.
#[derive(Debug)]
#[must_use = "dropping the lock gives it back"]
pub struct RunLock {
    run: RunDir,
    attempt: Attempt,
    _held: Option<PathFile>,
    is_exclusive: bool,
}

impl RunDir {
    /// Name of the directory in `out_dir` that contains the checkpoints.
    pub const CHECKPOINTS: &str = "checkpoints";

    /// Name of the file in `out_dir` that is locked while a run writes there.
    pub const LOCK_FILE: &str = ".lock";

    /// Name of the [`RunDir::CHECKPOINTS`] directory while its content is removed. In an object store, name of the
    /// object that marks this.
    const CLEARED: &str = "checkpoints.cleared.tmp";

    /// Creates the description of a run that writes to `out_dir`, which need not exist yet.
    pub fn new(out_dir: impl Into<PathBuf>) -> RunDir {
        RunDir::on(Files::anywhere(), out_dir.into())
    }

    pub(super) fn on(files: Files, out_dir: PathBuf) -> RunDir {
        let checkpoints = out_dir.join(Self::CHECKPOINTS);
        RunDir { files, out_dir, checkpoints }
    }

    /// Path of the complete checkpoint of a step, whether it exists or not.
    pub fn checkpoint(&self, step: u64) -> PathBuf {
        self.checkpoints.join(RunDir::name_of(step))
    }

    /// Directory in which an attempt writes the files of its ranks: a temporary one if names can be changed, otherwise
    /// the final one.
    pub(super) fn unfinished(&self, step: u64, attempt: Attempt) -> PathBuf {
        match self.renames() {
            true => self.checkpoints.join(format!("{}.{attempt}.tmp", RunDir::name_of(step))),
            false => self.checkpoint(step).join(attempt.to_string()),
        }
    }

    /// Name of the directory of a step's complete checkpoint.
    pub fn name_of(step: u64) -> String {
        format!("step-{step:08}")
    }

    /// Parses the step from the name of a complete checkpoint's directory. `None` if it is not one.
    pub fn step_named(path: &Path) -> Option<u64> {
        step_of(path.file_name()?.to_str()?)
    }

    /// Whether files can be renamed here: true for disks, false for object stores.
    pub(super) fn renames(&self) -> bool {
        self.files.renames(&self.out_dir)
    }

    /// Whether a step has a complete checkpoint.
    pub(super) fn is_complete(&self, step: u64) -> Result<bool, Error> {
        let complete = self.checkpoint(step);
        let last = if self.renames() { complete } else { complete.join(MANIFEST_FILE) };
        Ok(self.files.metadata_if_there(&last)?.is_some())
    }

    pub(super) fn cleared(&self) -> PathBuf {
        self.out_dir.join(Self::CLEARED)
    }

    /// The output directory.
    pub fn out_dir(&self) -> &Path {
        &self.out_dir
    }

    /// The directory that contains all checkpoints.
    pub fn checkpoints(&self) -> &Path {
        &self.checkpoints
    }

    /// Returns the steps of all complete checkpoints, in ascending order; empty if nothing was ever saved.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn steps(&self) -> Result<Vec<u64>, Error> {
        if self.files.metadata_if_there(&self.checkpoints)?.is_none() {
            return Ok(Vec::new());
        }
        let names = self.files.list(&self.checkpoints)?;
        let mut steps: Vec<u64> = names.iter().filter_map(|name| step_of(name)).collect();
        steps.sort_unstable();
        if !self.renames() {
            self.retain_complete(&mut steps)?;
        }
        Ok(steps)
    }

    /// Returns the step and path of the newest complete checkpoint, if any.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn newest(&self) -> Result<Option<(u64, PathBuf)>, Error> {
        Ok(self.steps()?.last().map(|&step| (step, self.checkpoint(step))))
    }

    /// Locks the run, and creates `out_dir` (not its parents) and its content. An object store has no lock to take.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if another process holds the lock; [`Error::Io`].
    pub fn lock(&self) -> Result<RunLock, Error> {
        self.lock_as(Attempt::draw())
    }

    pub(super) fn lock_as(&self, attempt: Attempt) -> Result<RunLock, Error> {
        if !self.renames() {
            return Ok(RunLock { run: self.clone(), attempt, _held: None, is_exclusive: false });
        }
        self.files.create_directory_if_absent(&self.out_dir)?;
        let path = self.out_dir.join(Self::LOCK_FILE);
        let held = self.files.open_lock(&path)?;
        let is_exclusive = match held.try_lock()? {
            Locked::Here => true,
            Locked::Unsupported => false,
            Locked::Elsewhere => {
                let reason = "it is locked by another process that writes to this directory; stop that run or choose \
                              another out_dir";
                return Err(Error::unavailable(&self.out_dir, reason));
            }
        };
        self.files.create_directory_if_absent(&self.checkpoints)?;
        self.files.sync_directory(&self.out_dir)?;
        Ok(RunLock { run: self.clone(), attempt, _held: Some(held), is_exclusive })
    }
}

impl RunLock {
    /// The run that is locked.
    pub fn run(&self) -> &RunDir {
        &self.run
    }

    /// The attempt that saves under this lock. It must be sent to all ranks.
    pub fn attempt(&self) -> Attempt {
        self.attempt
    }

    /// Whether other processes are locked out. False if the file system has no locks, and in object stores.
    pub fn is_exclusive(&self) -> bool {
        self.is_exclusive
    }

    /// Clears the directory of checkpoints in one step: after a crash either nothing or everything is cleared.
    /// [`RunLock::remove_cleared`] removes the cleared files.
    ///
    /// # Errors
    /// [`Error::WrongPath`] if that directory is a link; [`Error::Io`].
    pub fn clear(&self) -> Result<(), Error> {
        let RunDir { files, out_dir, checkpoints } = &self.run;
        if files.list(checkpoints)?.is_empty() {
            return Ok(());
        }
        if !self.run.renames() {
            return self.clear_objects();
        }
        if files.kind_of_name(checkpoints) != Some(FileKind::Directory) {
            let reason = "it is a link to a directory with checkpoints, which cannot be cleared in one step; \
                          remove what is there, or choose another out_dir";
            return Err(Error::wrong_path(checkpoints, reason));
        }
        self.remove_cleared()?;
        files.rename(checkpoints, &self.run.cleared())?;
        // Make the removal of the name durable before it is used again.
        files.sync_directory(out_dir)?;
        files.create_directory_if_absent(checkpoints)?;
        files.sync_directory(out_dir)
    }

    /// Whether checkpoints were cleared, and [`RunLock::remove_cleared`] has not completed since.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn is_clearing(&self) -> Result<bool, Error> {
        Ok(self.run.files.metadata_if_there(&self.run.cleared())?.is_some())
    }

    /// Removes the files that [`RunLock::clear`] cleared, in this process or in one that was killed.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn remove_cleared(&self) -> Result<(), Error> {
        match self.run.renames() {
            true => self.run.files.remove_tree(&self.run.cleared()),
            false if self.is_clearing()? => self.remove_cleared_objects(),
            false => Ok(()),
        }
    }

    /// Removes the leftovers of interrupted saves and of interrupted deletions of single checkpoints, and space
    /// reserved for saves. Call it before the first rank saves or after the last has saved. For object stores, see
    /// [`RunLock::remove_other_attempts`].
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn remove_leftovers(&self) -> Result<(), Error> {
        let (files, checkpoints) = (&self.run.files, &self.run.checkpoints);
        for name in files.list(checkpoints)? {
            if name.starts_with("step-") && name.ends_with(".tmp") {
                files.remove_tree(&checkpoints.join(name))?;
            } else if name.starts_with("reserved-") && name.ends_with(".tmp") {
                files.remove_if_there(&checkpoints.join(name))?;
            }
        }
        Ok(())
    }

    /// Removes the leftovers of a failed save of this attempt, if any. Every rank must have ended its part.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn discard(&self, step: u64) -> Result<(), Error> {
        self.run.files.remove_tree(&self.run.unfinished(step, self.attempt))
    }

    /// Sets the checkpoint of a step aside, if it exists: `.mark` is appended to its name. It is then no longer one of
    /// the run's checkpoints, but can still be inspected or named explicitly to resume from. In an object store, its
    /// manifest becomes `manifest.mark.json` instead. Returns its new path.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn set_aside(&self, step: u64, mark: &str) -> Result<Option<PathBuf>, Error> {
        let (files, checkpoint) = (&self.run.files, self.run.checkpoint(step));
        if !self.run.is_complete(step)? {
            return Ok(None);
        }
        if !self.run.renames() {
            return self.set_object_aside(step, mark).map(Some);
        }
        let aside = self.run.checkpoints.join(format!("{}.{mark}", RunDir::name_of(step)));
        files.remove_tree(&aside)?;
        files.rename(&checkpoint, &aside)?;
        files.sync_directory(&self.run.checkpoints)?;
        Ok(Some(aside))
    }

    /// Deletes all complete checkpoints except the newest `count`, those of the steps `best`, and the newest one up to
    /// step `proven`: later ones may turn out to belong to a run that has diverged. After an error more checkpoints are
    /// left than requested, and each of them is complete.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn keep_last(&self, count: NonZeroUsize, proven: u64, best: &[u64]) -> Result<(), Error> {
        let steps = self.run.steps()?;
        let newest_proven = steps.iter().rfind(|&&step| step <= proven);
        let old = &steps[..steps.len().saturating_sub(count.get())];
        let is_kept = |step: &u64| Some(step) == newest_proven || best.contains(step);
        old.iter().filter(|step| !is_kept(step)).try_for_each(|&step| self.delete(step))
    }

    /// Deletes the complete checkpoints of all steps after `step`, for a run that goes back to an older checkpoint and
    /// will save these steps again.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn delete_after(&self, step: u64) -> Result<(), Error> {
        let steps = self.run.steps()?;
        // Delete the newest first: after a crash the newest one left is never older than `step`.
        steps.iter().rev().take_while(|&&other| other > step).try_for_each(|&other| self.delete(other))
    }

    fn delete(&self, step: u64) -> Result<(), Error> {
        let (files, checkpoints) = (&self.run.files, &self.run.checkpoints);
        if !self.run.renames() {
            files.remove_if_there(&self.run.checkpoint(step).join(MANIFEST_FILE))?;
            return files.remove_tree(&self.run.checkpoint(step));
        }
        // The name contains this attempt, because without locks another one may be deleting the same checkpoint.
        let doomed = checkpoints.join(format!("{}.{}.old.tmp", RunDir::name_of(step), self.attempt));
        files.remove_tree(&doomed)?;
        if files.rename_if_there(&self.run.checkpoint(step), &doomed)? {
            files.sync_directory(checkpoints)?;
        }
        files.remove_tree(&doomed)
    }
}

/// Parses the step from the name of a complete checkpoint's directory; each step has exactly one name.
pub(crate) fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    (RunDir::name_of(step) == name).then_some(step)
}

/// The error for a step that already has a checkpoint.
pub(super) fn already_there(path: &Path) -> Error {
    let reason =
        "it exists already, and a checkpoint is never overwritten; remove it to save this step again";
    Error::wrong_path(path, reason)
}
