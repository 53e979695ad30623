//! The directory of a run: where its checkpoints are, who may change them, and which are kept.
//!
//! A checkpoint is complete when it has its final name, which it gets last and loses first: to delete one, it
//! is renamed to a name that nobody takes for a checkpoint. So half a checkpoint never looks whole, whatever
//! is interrupted when.

use std::{
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

use crate::{
    error::{Error, SaveFault},
    file_io::{Files, PathFile},
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
    _held: PathFile,
}

impl RunDir {
    /// The directory in `out_dir` that holds the checkpoints.
    pub const CHECKPOINTS: &str = "checkpoints";

    /// The file in `out_dir` whose lock says that a run writes there.
    pub const LOCK_FILE: &str = ".lock";

    /// The run that writes to `out_dir`, which need not exist yet.
    pub fn new(out_dir: impl Into<PathBuf>) -> RunDir {
        RunDir::on(Files::disk(), out_dir.into())
    }

    pub(super) fn on(files: Files, out_dir: PathBuf) -> RunDir {
        let checkpoints = out_dir.join(Self::CHECKPOINTS);
        RunDir { files, out_dir, checkpoints }
    }

    /// Where the complete checkpoint of a step is or will be.
    pub fn checkpoint(&self, step: u64) -> PathBuf {
        self.checkpoints.join(name_of(step))
    }

    /// Where it is while it is being saved.
    pub(super) fn unfinished(&self, step: u64) -> PathBuf {
        self.checkpoints.join(format!("{}.tmp", name_of(step)))
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
        Ok(steps)
    }

    /// The newest complete checkpoint, if there is one.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn newest(&self) -> Result<Option<(u64, PathBuf)>, Error> {
        Ok(self.steps()?.last().map(|&step| (step, self.checkpoint(step))))
    }

    /// Takes the lock of the run, creating `out_dir` (not its parents) and what belongs in it.
    ///
    /// # Errors
    /// [`SaveFault::Locked`] if another process holds it; [`Error::Io`].
    pub fn lock(&self) -> Result<RunLock, Error> {
        self.files.create_directory_if_absent(&self.out_dir)?;
        let path = self.out_dir.join(Self::LOCK_FILE);
        let held = self.files.open_lock(&path)?;
        if !held.try_lock()? {
            return Err(Error::Save { path: self.out_dir.clone(), fault: Box::new(SaveFault::Locked) });
        }
        self.files.create_directory_if_absent(&self.checkpoints)?;
        self.files.sync_directory(&self.out_dir)?;
        Ok(RunLock { run: self.clone(), _held: held })
    }
}

impl RunLock {
    /// The run that is locked.
    pub fn run(&self) -> &RunDir {
        &self.run
    }

    /// Removes what interrupted saves and deletions left. Call it once, before the first rank saves.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn remove_leftovers(&self) -> Result<(), Error> {
        let (files, checkpoints) = (&self.run.files, &self.run.checkpoints);
        for name in files.list(checkpoints)? {
            if name.starts_with("step-") && name.ends_with(".tmp") {
                files.remove_tree(&checkpoints.join(name))?;
            }
        }
        Ok(())
    }

    /// Deletes all complete checkpoints but the newest `count`. Call it after a commit; on an error more are
    /// left than asked for, and each is whole.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn keep_last(&self, count: NonZeroUsize) -> Result<(), Error> {
        let steps = self.run.steps()?;
        let old = &steps[..steps.len().saturating_sub(count.get())];
        old.iter().try_for_each(|&step| self.delete(step))
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
        let doomed = checkpoints.join(format!("{}.old.tmp", name_of(step)));
        if files.metadata_if_there(&doomed)?.is_some() {
            files.remove_tree(&doomed)?;
        }
        files.rename(&self.run.checkpoint(step), &doomed)?;
        files.sync_directory(checkpoints)?;
        files.remove_tree(&doomed)
    }
}

pub(crate) fn name_of(step: u64) -> String {
    format!("step-{step:08}")
}

/// The step of a complete checkpoint by the name of its directory; each step has one name only.
pub(crate) fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    (name_of(step) == name).then_some(step)
}
