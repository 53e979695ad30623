//! Chooses the checkpoint from which a run begins, and takes over its output folder.
//!
//! An earlier run is left untouched until this one is known to be able to begin: the folder is free, the checkpoint
//! belongs to this run, every rank has read its part, and no stop was requested. Exported weights are never removed
//! here; the export replaces them.

mod base;
mod choice;
mod soundness;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fsdp_ckpt::is_url;
use fsdp_ckpt::native::{Attempt, RunDir, RunLock};
use fsdp_comm::assembly::Assembly;
use fsdp_config::{Resolved, WatchedLoss};
use serde::{Deserialize, Serialize};

use super::divergence::Attempts;
use super::folder::{RESOLVED, finished_model, is_filled, not_empty};
use super::options::{Resume, RunOptions};
use super::warning::RunWarning;
use crate::atomic_file::write_small;
use crate::checkpoint::{Change, Source, StateTable, resolve_path};
use crate::error::TrainError;
use crate::events;
use crate::job::Job;
use crate::metrics::{EVALUATIONS, METRICS, MLFLOW, Recorder, STEPS, TENSORBOARD};
use crate::rule::LateParams;
use crate::wire_result;
pub use base::base_of;
use choice::{Chosen, choose};
use soundness::{damaged, is_damage, newest_sound};

/// The state in which a run begins.
pub(super) struct Start {
    /// Steps done.
    pub(super) step: u64,
    /// The checkpoint; `None` if the run starts from the beginning.
    pub(super) source: Option<Source>,
    /// Configuration changes during the run so far.
    pub(super) changes: Vec<Change>,
    /// The watched losses so far.
    pub(super) watched: Vec<WatchedLoss>,
    /// The parameters that began later than the run.
    pub(super) late: LateParams,
    /// Identifies this start of the run, in the names of incomplete files.
    pub(super) attempt: Attempt,
    /// The output folder; `Some` only in the process of the first rank.
    folder: Option<Folder>,
}

/// A locked output folder.
struct Folder {
    lock: Arc<RunLock>,
    earlier: Earlier,
    is_settled: AtomicBool,
}

/// The start of a run, as the first rank announces it.
#[derive(Serialize, Deserialize)]
struct Announcement {
    step: u64,
    from: AnnouncedSource,
    changes: Vec<Change>,
    watched: Vec<WatchedLoss>,
    late: LateParams,
    attempt: Attempt,
}

/// The checkpoint to resume from, as announced.
#[derive(Serialize, Deserialize)]
enum AnnouncedSource {
    /// None: the run starts from the beginning.
    Nothing,
    /// The checkpoint of this step in the run's own folder.
    Own,
    /// The checkpoint that the user named.
    Named,
}

/// How long the other ranks wait while the first one finds the checkpoint, for which it may have to read all of them.
/// If it fails, they hear that at once.
const START_TIMEOUT: Duration = Duration::from_secs(7 * 24 * 3600);

/// What happens to an earlier run in the folder.
enum Earlier {
    /// It is continued: its later checkpoints are removed, except for those of the `unsound` steps, which are set
    /// aside.
    Continued { unsound: Vec<u64> },
    /// It is replaced, together with all its checkpoints if it may have any.
    Replaced { has_checkpoints: bool },
}

impl Start {
    /// Determines where the run begins, in the process of the first rank, and announces that to the others.
    ///
    /// # Errors
    /// Errors of [`Start::prepare`], which other processes receive as [`TrainError::Remote`]; there, also
    /// [`TrainError::Core`] if the first process is lost.
    pub(super) fn agree<A>(
        job: &Job<A>,
        table: &StateTable,
        options: &RunOptions<'_>,
        assembly: &dyn Assembly,
    ) -> Result<Self, TrainError> {
        const TOPIC: &str = "start";
        if !assembly.is_leader() {
            let announced = assembly.hear(TOPIC, START_TIMEOUT)?;
            return Self::from_announcement(job, table, options, wire_result::decode(&announced)?);
        }
        let start = Self::prepare(job, table, options);
        let announcement = start.as_ref().map(|start| start.announcement(Path::new(&job.config.run.out_dir)));
        let announced =
            assembly.announce(TOPIC, wire_result::encode(announcement.as_ref().map_err(|error| *error)));
        let start = start?;
        announced?;
        Ok(start)
    }

    fn announcement(&self, out_dir: &Path) -> Announcement {
        let checkpoint = RunDir::new(out_dir).checkpoint(self.step);
        let from = match &self.source {
            None => AnnouncedSource::Nothing,
            Some(Source::Native(source)) if source.dir() == checkpoint => AnnouncedSource::Own,
            Some(_) => AnnouncedSource::Named,
        };
        let (changes, watched, late) = (self.changes.clone(), self.watched.clone(), self.late.clone());
        Announcement { step: self.step, from, changes, watched, late, attempt: self.attempt }
    }

    fn from_announcement<A>(
        job: &Job<A>,
        table: &StateTable,
        options: &RunOptions<'_>,
        announcement: Announcement,
    ) -> Result<Self, TrainError> {
        let Announcement { step, from, changes, watched, late, attempt } = announcement;
        let source = match (from, &options.resume) {
            (AnnouncedSource::Nothing, _) => None,
            (AnnouncedSource::Named, Resume::From { path, .. }) => {
                Some(Source::open(job, table, &resolve_path(path)?)?)
            }
            (AnnouncedSource::Own | AnnouncedSource::Named, _) => {
                let path = RunDir::new(&job.config.run.out_dir).checkpoint(step);
                Some(Source::open(job, table, &path)?)
            }
        };
        Ok(Self { step, source, changes, watched, late, attempt, folder: None })
    }

    /// Determines whether and where a run can begin. Files of an earlier run are kept until [`Start::settle`].
    ///
    /// # Errors
    /// [`TrainError::Input`] for a folder or a checkpoint with which the run cannot begin, [`TrainError::Checkpoint`] for one
    /// in use or damaged; [`TrainError::Stopped`], [`TrainError::Io`].
    fn prepare<A>(job: &Job<A>, table: &StateTable, options: &RunOptions<'_>) -> Result<Self, TrainError> {
        let out_dir = Path::new(&job.config.run.out_dir);
        let (run, is_filled) = (RunDir::new(out_dir), is_filled(out_dir, &job.config.data)?);
        let choose = |path: &Path| choose(job, table, options, Source::open(job, table, path)?);
        let named =
            if let Resume::From { path, .. } = &options.resume { Some(resolve_path(path)?) } else { None };
        // Links were resolved, so that a checkpoint of this folder is recognized under any name.
        let is_in_out_dir = |path: &Path| path.parent().is_some_and(|dir| is_same(dir, run.checkpoints()));
        let (in_out_dir, external) = named.map_or((None, None), |path| match is_in_out_dir(&path) {
            true => (Some(path), None),
            false => (None, Some(path)),
        });
        let resumes_newest = matches!(options.resume, Resume::Newest | Resume::NewestSound);
        if in_out_dir.is_none() && !resumes_newest && !options.overwrite && is_filled {
            return Err(not_empty(out_dir));
        }
        // Done before the folder is created, so that a run that cannot begin leaves none.
        let external = external.as_deref().map(choose).transpose()?;
        if options.stop.load(Ordering::Relaxed) {
            return Err(TrainError::Stopped);
        }
        let lock = lock(&run, out_dir, options)?;
        let (chosen, unsound) = match in_out_dir {
            Some(path) => (Some(choose(&path)?), Vec::new()),
            None if resumes_newest => newest(lock.run(), options, choose)?,
            None => (None, Vec::new()),
        };
        let continues = chosen.is_some();
        if let Some(Chosen { resumed, .. }) = &chosen {
            refuse_newer(lock.run(), resumed.step, &unsound, options)?;
        } else if resumes_newest && !options.overwrite && !lock.is_clearing()? {
            refuse_only_model(out_dir)?;
        }
        let earlier = match continues {
            true => Earlier::Continued { unsound },
            false => Earlier::Replaced { has_checkpoints: options.overwrite },
        };
        Ok(Self::from_choice(chosen.or(external), lock, earlier, options))
    }

    fn from_choice(
        chosen: Option<Chosen>,
        lock: RunLock,
        earlier: Earlier,
        options: &RunOptions<'_>,
    ) -> Self {
        chosen.iter().for_each(|chosen| {
            events::resumed(chosen.resumed.step, &chosen.resumed.path, chosen.resumed.changes.len())
        });
        if let Some(warning) = chosen.as_ref().and_then(Chosen::warning) {
            options.reporter.warn(&warning);
        }
        if chosen.is_some() || matches!(options.resume, Resume::Newest | Resume::NewestSound) {
            options.reporter.resumed(chosen.as_ref().map(|chosen| &chosen.resumed));
        }
        let (step, source, changes, watched, late) = match chosen {
            Some(Chosen { source, earlier, watched, late, resumed, .. }) => {
                let changes = earlier.into_iter().chain(resumed.changes).collect();
                (resumed.step, Some(source), changes, watched, late)
            }
            None => (0, None, Vec::new(), Vec::new(), LateParams::new()),
        };
        let attempt = lock.attempt();
        let folder = Folder { lock: Arc::new(lock), earlier, is_settled: AtomicBool::new(false) };
        Self { step, source, changes, watched, late, attempt, folder: Some(folder) }
    }

    /// The lock of the output folder; `Some` only in the process of the first rank.
    pub(super) fn lock(&self) -> Option<&Arc<RunLock>> {
        self.folder.as_ref().map(|folder| &folder.lock)
    }

    /// Takes over the output folder: removes files of an earlier run that this one replaces, but never its exported
    /// model. The first rank calls it when every rank has read its part of the checkpoint.
    ///
    /// Checkpoints are removed first, in one atomic step, and the mark that records their removal last. If this is
    /// interrupted, a later start finds either the complete earlier run or no run to resume.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`], [`TrainError::Io`].
    pub(super) fn settle(&self, config: &Resolved) -> Result<Recorder, TrainError> {
        let Folder { lock, earlier, is_settled } = self.folder.as_ref().expect("the first rank has the lock");
        is_settled.store(true, Ordering::Relaxed);
        let out_dir = Path::new(&config.run.out_dir);
        let lines_until = match earlier {
            Earlier::Continued { unsound } => {
                unsound.iter().try_for_each(|&step| lock.set_aside(step, "unsound").map(drop))?;
                lock.delete_after(self.step)?;
                Attempts::forget_after(out_dir, Some(self.step))?;
                self.step
            }
            Earlier::Replaced { has_checkpoints } => {
                if *has_checkpoints {
                    lock.clear()?;
                }
                match has_checkpoints {
                    true => Attempts::forget_replaced(out_dir, config)?,
                    // Without checkpoints to replace, this is another try of the same run.
                    false => Attempts::forget_after(out_dir, Some(0))?,
                }
                0
            }
        };
        let text = format!("# Written by fsdp {}.\n\n{}", crate::VERSION, config.to_toml());
        write_small(&out_dir.join(RESOLVED), text)?;
        let metrics = Recorder::resume(config, lines_until)?;
        lock.remove_cleared()?;
        Ok(metrics)
    }

    /// Removes what [`Start::settle`] has written, unless the run continues or replaces an earlier one: for a run that
    /// has failed before its first step was done.
    pub(super) fn unsettle(&self, out_dir: &Path) {
        let settled = self.folder.as_ref().filter(|folder| folder.is_settled.load(Ordering::Relaxed));
        let is_new = |folder: &Folder| matches!(folder.earlier, Earlier::Replaced { has_checkpoints: false });
        if is_url(out_dir) || !settled.is_some_and(is_new) {
            return;
        }
        // What is left shows only that a run began there.
        for file in [RESOLVED, METRICS, STEPS, EVALUATIONS] {
            let _ = fs::remove_file(out_dir.join(file));
        }
        for folder in [TENSORBOARD, MLFLOW] {
            let _ = fs::remove_dir_all(out_dir.join(folder));
        }
    }

    /// Adds details to the error of a failed run: if a rank could not read the newest checkpoint, names the newest
    /// older one that is sound.
    pub(super) fn explain(&self, error: TrainError, options: &RunOptions<'_>) -> TrainError {
        let TrainError::RankFailed { rank, source } = error else { return error };
        let is_newest = matches!(options.resume, Resume::Newest | Resume::NewestSound);
        let reads = self.folder.as_ref().filter(|folder| {
            is_newest && self.source.is_some() && !folder.is_settled.load(Ordering::Relaxed)
        });
        match (*source, reads) {
            (TrainError::Stopped, _) => TrainError::Stopped,
            (TrainError::Checkpoint(fault), Some(folder)) if is_damage(&fault) => {
                damaged(folder.lock.run(), self.step, &fault, options.stop)
            }
            (other, _) => TrainError::RankFailed { rank, source: Box::new(other) },
        }
    }
}

/// Creates the output folder and locks it.
fn lock(run: &RunDir, out_dir: &Path, options: &RunOptions<'_>) -> Result<RunLock, TrainError> {
    if is_url(out_dir) {
        // Object stores have no locks: the first run to save a step wins, and the other one gets an error.
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

/// The newest checkpoint of a run, if any, and the steps of unsound ones that were skipped.
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
            Err(damaged(run, step, &fault, options.stop))
        }
        chosen => Ok((Some(chosen?), Vec::new())),
    }
}

/// Fails if there are sound checkpoints after the one to resume from, unless `overwrite` permits their removal.
fn refuse_newer(
    run: &RunDir,
    step: u64,
    unsound: &[u64],
    options: &RunOptions<'_>,
) -> Result<(), TrainError> {
    let newest = run.steps()?.into_iter().rev().find(|later| !unsound.contains(later));
    match newest {
        Some(newest) if newest > step && !options.overwrite => Err(TrainError::Input(format!(
            "{} holds checkpoints after step {step}, up to step {newest}; pass --overwrite to remove them, --resume to \
                 continue from the newest, or choose another run.out_dir",
            run.checkpoints().display()
        ))),
        _ => Ok(()),
    }
}

/// Fails if the folder holds only a finished model: without a checkpoint the run would start over and replace it.
fn refuse_only_model(out_dir: &Path) -> Result<(), TrainError> {
    let Some(model) = finished_model(out_dir)? else { return Ok(()) };
    Err(TrainError::Input(format!(
        "run.out_dir {} holds {} but no checkpoint: its run has ended and cannot be resumed. Pass --overwrite to train from \
         the start; to continue from these weights, --set model.init=pretrained --set model.path={}, with --overwrite or \
         another run.out_dir",
        out_dir.display(),
        model.display(),
        model.parent().unwrap_or(out_dir).display()
    )))
}

/// Whether two paths denote the same directory.
fn is_same(a: &Path, b: &Path) -> bool {
    if is_url(a) || is_url(b) {
        return a == b;
    }
    let dir =
        |path: &Path| fs::canonicalize(if path.as_os_str().is_empty() { Path::new(".") } else { path }).ok();
    dir(a).is_some() && dir(a) == dir(b)
}
