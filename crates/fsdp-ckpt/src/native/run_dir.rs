//! The directory of a run: where its checkpoints are, who may change them, and which are kept.
//!
//! A checkpoint is complete when it has its manifest. On a disk it has it under its final name, which it gets last and
//! loses first: to delete one, it is renamed to a name that nobody takes for a checkpoint. So half a checkpoint never
//! looks whole, whatever is interrupted when. All of them go in one step too: the directory that holds them gets another
//! name. How it is without renaming is in `objects`.

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

/// The right to change the checkpoints of a run, held by one process at a time: that of rank 0.
///
/// The operating system gives the lock back when the process ends, however it ends.
#[derive(Debug)]
#[must_use = "dropping the lock gives it back"]
pub struct RunLock {
    run: RunDir,
    attempt: Attempt,
    _held: Option<PathFile>,
    is_exclusive: bool,
}

impl RunDir {
    /// The directory in `out_dir` that holds the checkpoints.
    pub const CHECKPOINTS: &str = "checkpoints";

    /// The file in `out_dir` whose lock says that a run writes there.
    pub const LOCK_FILE: &str = ".lock";

    /// What [`RunDir::CHECKPOINTS`] is called while it is removed with all that is in it.
    const CLEARED: &str = "checkpoints.cleared.tmp";

    /// The run that writes to `out_dir`, which need not exist yet.
    pub fn new(out_dir: impl Into<PathBuf>) -> RunDir {
        RunDir::on(Files::anywhere(), out_dir.into())
    }

    pub(super) fn on(files: Files, out_dir: PathBuf) -> RunDir {
        let checkpoints = out_dir.join(Self::CHECKPOINTS);
        RunDir { files, out_dir, checkpoints }
    }

    /// Where the complete checkpoint of a step is or will be.
    pub fn checkpoint(&self, step: u64) -> PathBuf {
        self.checkpoints.join(RunDir::name_of(step))
    }

    /// Where an attempt writes the files of its ranks: where names can be changed, not where they are in the end.
    pub(super) fn unfinished(&self, step: u64, attempt: Attempt) -> PathBuf {
        match self.renames() {
            true => self.checkpoints.join(format!("{}.{attempt}.tmp", RunDir::name_of(step))),
            false => self.checkpoint(step).join(attempt.to_string()),
        }
    }

    /// The name of the directory of a complete checkpoint.
    pub fn name_of(step: u64) -> String {
        format!("step-{step:08}")
    }

    /// The step that the name of a directory gives, if it is the name of a complete checkpoint.
    pub fn step_named(path: &Path) -> Option<u64> {
        step_of(path.file_name()?.to_str()?)
    }

    /// Whether names can be changed here, as on disks and not in object stores.
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

    /// The directory of all checkpoints.
    pub fn checkpoints(&self) -> &Path {
        &self.checkpoints
    }

    /// The steps of all complete checkpoints, in order; none if nothing was ever saved.
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

    /// The newest complete checkpoint, if there is one.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn newest(&self) -> Result<Option<(u64, PathBuf)>, Error> {
        Ok(self.steps()?.last().map(|&step| (step, self.checkpoint(step))))
    }

    /// Takes the lock of the run, creating `out_dir` (not its parents) and what belongs in it. In an object store there
    /// is no lock to take.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if another process holds it; [`Error::Io`].
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

    /// The attempt that saves under this lock. All ranks must know it.
    pub fn attempt(&self) -> Attempt {
        self.attempt
    }

    /// Whether other processes are kept out. They are not where the file system has no locks, nor in object stores.
    pub fn is_exclusive(&self) -> bool {
        self.is_exclusive
    }

    /// Takes away everything in the directory of checkpoints, in one step: after a crash either nothing was
    /// touched or nothing is left. It is removed by [`RunLock::remove_cleared`].
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
            let reason = "it is a link to a directory with checkpoints, which can not be cleared in one step; remove what \
                          is there, or choose another out_dir";
            return Err(Error::wrong_path(checkpoints, reason));
        }
        self.remove_cleared()?;
        files.rename(checkpoints, &self.run.cleared())?;
        // The name is gone for good before it is used again.
        files.sync_directory(out_dir)?;
        files.create_directory_if_absent(checkpoints)?;
        files.sync_directory(out_dir)
    }

    /// Whether all checkpoints were taken away, and [`RunLock::remove_cleared`] has not ended since.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn is_clearing(&self) -> Result<bool, Error> {
        Ok(self.run.files.metadata_if_there(&self.run.cleared())?.is_some())
    }

    /// Removes what [`RunLock::clear`] took away, in this process or in one that was killed.
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

    /// Removes what interrupted saves and deletions of single checkpoints left, and what is set aside for saves. Call it
    /// before the first rank saves or after the last. In object stores see [`RunLock::remove_other_attempts`].
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

    /// Removes what a save of this attempt that failed has left, if anything. Every rank must have ended its part.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn discard(&self, step: u64) -> Result<(), Error> {
        self.run.files.remove_tree(&self.run.unfinished(step, self.attempt))
    }

    /// Sets the checkpoint of a step aside, if there is one: its name gets `.mark` appended, under which it is none of the
    /// run's checkpoints any more, and can still be inspected or named to go on from. In an object store its manifest is
    /// given the name `manifest.mark.json` instead. Returns where that is now.
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

    /// Deletes all complete checkpoints but the newest `count`, and never the newest of those up to step `proven`: what
    /// was saved later may turn out to be of a run that has diverged; nor those of the steps `best`. On an error more are
    /// left than asked for, and each is whole.
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

    /// Deletes the complete checkpoints of all steps after `step`: those of the future, to a run that goes
    /// back to an older checkpoint and will save these steps again.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn delete_after(&self, step: u64) -> Result<(), Error> {
        let steps = self.run.steps()?;
        // The newest goes first: after a crash the newest one left is never older than `step`.
        steps.iter().rev().take_while(|&&other| other > step).try_for_each(|&other| self.delete(other))
    }

    fn delete(&self, step: u64) -> Result<(), Error> {
        let (files, checkpoints) = (&self.run.files, &self.run.checkpoints);
        if !self.run.renames() {
            files.remove_if_there(&self.run.checkpoint(step).join(MANIFEST_FILE))?;
            return files.remove_tree(&self.run.checkpoint(step));
        }
        // A name of this attempt's own: where there are no locks, another one may be deleting the same checkpoint.
        let doomed = checkpoints.join(format!("{}.{}.old.tmp", RunDir::name_of(step), self.attempt));
        files.remove_tree(&doomed)?;
        if files.rename_if_there(&self.run.checkpoint(step), &doomed)? {
            files.sync_directory(checkpoints)?;
        }
        files.remove_tree(&doomed)
    }
}

/// The step of a complete checkpoint by the name of its directory; each step has one name only.
pub(crate) fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    (RunDir::name_of(step) == name).then_some(step)
}
