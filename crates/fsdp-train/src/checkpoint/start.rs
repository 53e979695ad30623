//! From which checkpoint a run begins, and what becomes of its output folder.
//!
//! Nothing of an earlier run is touched before it is known that this one can begin: the folder is free, the
//! checkpoint is of this run, every rank has read its part of it, and nobody has asked to stop. Exported weights are
//! never removed here; the export replaces them.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fsdp_ckpt::is_url;
use fsdp_ckpt::native::{Attempt, RunDir, RunLock};
use fsdp_comm::assembly::Assembly;
use serde::{Deserialize, Serialize};

use super::folder::{RESOLVED, finished_model, is_filled};
use super::foreign::Taken;
use super::meeting::not_heard;
use super::run_state::Change;
use super::soundness::{damaged, is_damage, newest_sound};
use super::source::{Chosen, Source, choose, found};
use super::table::StateTable;
use super::warning::RunWarning;
use crate::config::{Resolved, WatchedLoss};
use crate::error::TrainError;
use crate::events;
use crate::job::Job;
use crate::metrics::Recorder;
use crate::told;
use crate::train::RunOptions;
use crate::whole_file::write_small;

/// Whether a run goes on from a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resume {
    /// It begins anew.
    Fresh,
    /// It goes on from the newest complete checkpoint of its output folder, or begins if there is none.
    Newest,
    /// As [`Resume::Newest`], but it passes over checkpoints that can not be read whole, and sets them aside.
    NewestSound,
    /// It goes on from this checkpoint, its own, another run's or another trainer's.
    From {
        /// The checkpoint.
        path: PathBuf,
        /// Steps done, where the checkpoint of another trainer does not say.
        at_step: Option<u64>,
    },
}

/// A checkpoint that a run goes on from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resumed {
    /// Steps done.
    pub step: u64,
    /// The checkpoint.
    pub path: PathBuf,
    /// What is changed from here on.
    pub changes: Vec<Change>,
    /// What was taken, where another trainer has saved it.
    pub taken: Option<Taken>,
}

/// Where a run begins.
pub(crate) struct Start {
    /// Steps done.
    pub(crate) step: u64,
    /// The checkpoint, if the run goes on from one.
    pub(crate) source: Option<Source>,
    /// What was changed in the course of the run, up to here.
    pub(crate) changes: Vec<Change>,
    /// The losses that were watched up to here.
    pub(crate) watched: Vec<WatchedLoss>,
    /// What tells this start of the run from others, in the names of what is not complete yet.
    pub(crate) attempt: Attempt,
    /// The output folder, in the process of the first rank.
    folder: Option<Folder>,
}

/// An output folder that is locked.
struct Folder {
    lock: Arc<RunLock>,
    earlier: Earlier,
    is_settled: AtomicBool,
}

/// Where a run begins, as the first rank tells it.
#[derive(Serialize, Deserialize)]
struct Beginning {
    step: u64,
    from: From,
    changes: Vec<Change>,
    watched: Vec<WatchedLoss>,
    attempt: Attempt,
}

/// What a run goes on from.
#[derive(Serialize, Deserialize)]
enum From {
    /// Nothing.
    Nothing,
    /// The checkpoint of this step in its own folder.
    Own,
    /// The checkpoint that was named.
    Named,
}

/// How long the other ranks wait for the first one to find the checkpoint, which may mean to read all that there are. If
/// it fails they are told so, and at once.
const PATIENCE: Duration = Duration::from_secs(7 * 24 * 3600);

/// What becomes of an earlier run in the folder.
enum Earlier {
    /// It goes on: its checkpoints after this one are removed, but for unsound ones of these steps, which are set
    /// aside.
    GoesOn { unsound: Vec<u64> },
    /// It is replaced, with all of its checkpoints if there may be any.
    Replaced { has_checkpoints: bool },
}

impl Start {
    /// Finds out where a run begins, in the process of the first rank, and tells the others.
    ///
    /// # Errors
    /// Those of [`Start::prepare`]; in other processes [`TrainError::Told`] of them, and [`TrainError::Core`] when the
    /// first one is lost.
    pub(crate) fn agree<A>(
        job: &Job<A>,
        table: &StateTable,
        options: &RunOptions<'_>,
        assembly: &dyn Assembly,
    ) -> Result<Self, TrainError> {
        const TOPIC: &str = "start";
        if !assembly.is_leader() {
            let told = assembly.hear(TOPIC, PATIENCE).map_err(not_heard)?;
            return Self::hear(job, table, options, told::decode(&told)?);
        }
        let start = Self::prepare(job, table, options);
        let beginning = start.as_ref().map(|start| start.beginning(Path::new(&job.config.run.out_dir)));
        let told = assembly.announce(TOPIC, told::encode(beginning.as_ref().map_err(|error| *error)));
        let start = start?;
        told.map_err(fsdp_core::Error::from)?;
        Ok(start)
    }

    fn beginning(&self, out_dir: &Path) -> Beginning {
        let own = RunDir::new(out_dir).checkpoint(self.step);
        let from = match &self.source {
            None => From::Nothing,
            Some(Source::Native(source)) if source.dir() == own => From::Own,
            Some(_) => From::Named,
        };
        let (changes, watched) = (self.changes.clone(), self.watched.clone());
        Beginning { step: self.step, from, changes, watched, attempt: self.attempt }
    }

    fn hear<A>(
        job: &Job<A>,
        table: &StateTable,
        options: &RunOptions<'_>,
        beginning: Beginning,
    ) -> Result<Self, TrainError> {
        let Beginning { step, from, changes, watched, attempt } = beginning;
        let source = match (from, &options.resume) {
            (From::Nothing, _) => None,
            (From::Named, Resume::From { path, .. }) => Some(Source::open(job, table, &found(path)?)?),
            (From::Own | From::Named, _) => {
                let path = RunDir::new(&job.config.run.out_dir).checkpoint(step);
                Some(Source::open(job, table, &path)?)
            }
        };
        Ok(Self { step, source, changes, watched, attempt, folder: None })
    }

    /// Finds out whether a run can begin, and where. What an earlier run left is still there afterwards: see
    /// [`Start::settle`].
    ///
    /// # Errors
    /// [`TrainError::OutDirNotEmpty`], [`TrainError::NewerCheckpoints`], [`TrainError::NoCheckpoint`],
    /// [`TrainError::OtherRun`], [`TrainError::NothingLeft`], [`TrainError::Renamed`], [`TrainError::Damaged`],
    /// [`TrainError::NoSoundCheckpoint`], [`TrainError::OnlyModel`], [`TrainError::Stopped`],
    /// [`TrainError::Checkpoint`] (a damaged checkpoint, a folder in use), [`TrainError::Io`].
    fn prepare<A>(job: &Job<A>, table: &StateTable, options: &RunOptions<'_>) -> Result<Self, TrainError> {
        let out_dir = Path::new(&job.config.run.out_dir);
        let (run, is_filled) = (RunDir::new(out_dir), is_filled(out_dir, &job.config.data)?);
        let choose = |path: &Path| choose(job, table, options, Source::open(job, table, path)?);
        let named = if let Resume::From { path, .. } = &options.resume { Some(found(path)?) } else { None };
        // Links were resolved, so that a checkpoint of this folder is known as such by whatever name.
        let is_own = |path: &Path| path.parent().is_some_and(|dir| is_same(dir, run.checkpoints()));
        let (own, foreign) = named.map_or((None, None), |path| match is_own(&path) {
            true => (Some(path), None),
            false => (None, Some(path)),
        });
        let looks = matches!(options.resume, Resume::Newest | Resume::NewestSound);
        if own.is_none() && !looks && !options.overwrite && is_filled {
            return Err(TrainError::OutDirNotEmpty { path: out_dir.into() });
        }
        // Before the folder is made: what can not begin leaves none.
        let foreign = foreign.as_deref().map(choose).transpose()?;
        if options.stop.load(Ordering::Relaxed) {
            return Err(TrainError::Stopped);
        }
        let lock = lock(&run, out_dir, options)?;
        let (chosen, unsound) = match own {
            Some(path) => (Some(choose(&path)?), Vec::new()),
            None if looks => newest(lock.run(), options, choose)?,
            None => (None, Vec::new()),
        };
        let goes_on = chosen.is_some();
        if let Some(Chosen { resumed, .. }) = &chosen {
            refuse_newer(lock.run(), resumed.step, &unsound, options)?;
        } else if looks && !options.overwrite && !lock.is_clearing()? {
            refuse_only_model(out_dir)?;
        }
        let earlier = match goes_on {
            true => Earlier::GoesOn { unsound },
            false => Earlier::Replaced { has_checkpoints: options.overwrite },
        };
        Ok(Self::at(chosen.or(foreign), lock, earlier, options))
    }

    fn at(chosen: Option<Chosen>, lock: RunLock, earlier: Earlier, options: &RunOptions<'_>) -> Self {
        chosen.iter().for_each(|chosen| events::resumed(&chosen.resumed));
        if chosen.is_some() || matches!(options.resume, Resume::Newest | Resume::NewestSound) {
            options.reporter.resumed(chosen.as_ref().map(|chosen| &chosen.resumed));
        }
        let (step, source, changes, watched) = match chosen {
            Some(Chosen { source, earlier, watched, resumed }) => {
                let changes = earlier.into_iter().chain(resumed.changes).collect();
                (resumed.step, Some(source), changes, watched)
            }
            None => (0, None, Vec::new(), Vec::new()),
        };
        let attempt = lock.attempt();
        let folder = Folder { lock: Arc::new(lock), earlier, is_settled: AtomicBool::new(false) };
        Self { step, source, changes, watched, attempt, folder: Some(folder) }
    }

    /// The lock of the output folder, in the process of the first rank.
    pub(crate) fn lock(&self) -> Option<&Arc<RunLock>> {
        self.folder.as_ref().map(|folder| &folder.lock)
    }

    /// Makes the output folder this run's: removes what an earlier run left and this one replaces, but never its
    /// exported model. To be called by the first rank, when every rank has read its part of the checkpoint.
    ///
    /// The checkpoints go first, in one step, and the mark that they are gone goes last: whenever this is cut off, a
    /// later start finds either the earlier run, whole, or none that could be gone on from.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`], [`TrainError::Io`].
    pub(crate) fn settle(&self, config: &Resolved) -> Result<Recorder, TrainError> {
        let Folder { lock, earlier, is_settled } = self.folder.as_ref().expect("the first rank has the lock");
        is_settled.store(true, Ordering::Relaxed);
        let lines_until = match earlier {
            Earlier::GoesOn { unsound } => {
                unsound.iter().try_for_each(|&step| lock.set_aside(step, "unsound").map(drop))?;
                lock.delete_after(self.step)?;
                self.step
            }
            Earlier::Replaced { has_checkpoints } => {
                if *has_checkpoints {
                    lock.clear()?;
                }
                0
            }
        };
        let text = format!("# Written by fsdp {}.\n\n{}", crate::VERSION, config.to_toml());
        write_small(&Path::new(&config.run.out_dir).join(RESOLVED), text)?;
        let metrics = Recorder::resume(config, lines_until)?;
        lock.remove_cleared()?;
        Ok(metrics)
    }

    /// The error of a run that failed: where a rank could not read the newest checkpoint, it names the older ones
    /// that can be read.
    pub(crate) fn explain(&self, error: TrainError, options: &RunOptions<'_>) -> TrainError {
        let TrainError::RankFailed { rank, source } = error else { return error };
        let is_newest = matches!(options.resume, Resume::Newest | Resume::NewestSound);
        let reads = self.folder.as_ref().filter(|folder| {
            is_newest && self.source.is_some() && !folder.is_settled.load(Ordering::Relaxed)
        });
        match (*source, reads) {
            (TrainError::Stopped, _) => TrainError::Stopped,
            (TrainError::Checkpoint(fault), Some(folder)) if is_damage(&fault) => {
                damaged(folder.lock.run(), self.step, fault, options.stop)
            }
            (other, _) => TrainError::RankFailed { rank, source: Box::new(other) },
        }
    }
}

/// Makes the output folder and locks it.
fn lock(run: &RunDir, out_dir: &Path, options: &RunOptions<'_>) -> Result<RunLock, TrainError> {
    if is_url(out_dir) {
        // Nobody can be kept out there: whoever saves a step first has it, and the other is told so.
        return Ok(run.lock()?);
    }
    fs::create_dir_all(out_dir).map_err(TrainError::io("create", out_dir))?;
    let lock = run.lock()?;
    if !lock.is_exclusive() {
        options.reporter.warn(&RunWarning::NoLocks { out_dir: out_dir.into() });
    }
    lock.remove_leftovers()?;
    Ok(lock)
}

/// The newest checkpoint of a run if it has any, and the steps of unsound ones that were passed over.
fn newest(
    run: &RunDir,
    options: &RunOptions<'_>,
    choose: impl Fn(&Path) -> Result<Chosen, TrainError>,
) -> Result<(Option<Chosen>, Vec<u64>), TrainError> {
    if options.resume == Resume::NewestSound {
        let Some((path, unsound)) = newest_sound(run, options)? else { return Ok((None, Vec::new())) };
        return Ok((Some(choose(&path)?), unsound));
    }
    let Some((step, path)) = run.newest()? else { return Ok((None, Vec::new())) };
    match choose(&path) {
        Err(TrainError::Checkpoint(fault)) if is_damage(&fault) => {
            Err(damaged(run, step, fault, options.stop))
        }
        chosen => Ok((Some(chosen?), Vec::new())),
    }
}

/// Sound checkpoints of later steps than the one that the run goes on from are removed with leave only.
fn refuse_newer(
    run: &RunDir,
    step: u64,
    unsound: &[u64],
    options: &RunOptions<'_>,
) -> Result<(), TrainError> {
    let newest = run.steps()?.into_iter().rev().find(|later| !unsound.contains(later));
    match newest {
        Some(newest) if newest > step && !options.overwrite => {
            Err(TrainError::NewerCheckpoints { dir: run.checkpoints().to_owned(), step, newest })
        }
        _ => Ok(()),
    }
}

/// To go on without a checkpoint is to begin, which would replace the model of a finished run.
fn refuse_only_model(out_dir: &Path) -> Result<(), TrainError> {
    match finished_model(out_dir)? {
        Some(model) => Err(TrainError::OnlyModel { out_dir: out_dir.to_owned(), model }),
        None => Ok(()),
    }
}

/// Whether two paths lead to one directory.
fn is_same(a: &Path, b: &Path) -> bool {
    if is_url(a) || is_url(b) {
        return a == b;
    }
    let dir =
        |path: &Path| fs::canonicalize(if path.as_os_str().is_empty() { Path::new(".") } else { path }).ok();
    dir(a).is_some() && dir(a) == dir(b)
}
