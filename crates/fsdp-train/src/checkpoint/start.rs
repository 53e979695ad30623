//! From which checkpoint a run begins, and what becomes of its output folder.
//!
//! Nothing of an earlier run is touched before it is known that this one can begin: the folder is free, the
//! checkpoint is of this run, and every rank has read its part of it. Exported weights are never removed here; the
//! export replaces them.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fsdp_ckpt::native::{MANIFEST_FILE, NativeReader, RunDir, RunLock};

use super::run_state::{Change, RunState};
use super::table::StateTable;
use crate::error::TrainError;
use crate::job::Job;
use crate::train::{MODEL, RunOptions};

/// What a run that begins anew replaces under `overwrite`. The exported model is replaced when it is complete.
const REPLACED: [&str; 2] = ["metrics.jsonl", "resolved.toml"];

/// Whether a run goes on from a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resume {
    /// It begins anew.
    Fresh,
    /// It goes on from the newest complete checkpoint of its output folder, or begins if there is none.
    Newest,
    /// It goes on from this checkpoint.
    From(PathBuf),
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
}

/// Where a run begins.
pub(crate) struct Start {
    /// Steps done.
    pub(crate) step: u64,
    /// The checkpoint, if the run goes on from one.
    pub(crate) source: Option<Arc<NativeReader>>,
    /// What was changed in the course of the run, up to here.
    pub(crate) changes: Vec<Change>,
    replaced: Replaced,
    /// The lock of the output folder.
    pub(crate) lock: Arc<RunLock>,
}

/// What a run replaces of an earlier one in its folder.
enum Replaced {
    /// Everything that a run writes.
    All,
    /// Checkpoints after this step.
    After(u64),
}

impl Start {
    /// Finds out whether a run can begin, and where. What an earlier run left is still there afterwards: see
    /// [`Start::settle`].
    ///
    /// # Errors
    /// [`TrainError::OutDirNotEmpty`], [`TrainError::NewerCheckpoints`], [`TrainError::NoCheckpoint`],
    /// [`TrainError::OtherRun`], [`TrainError::NothingLeft`], [`TrainError::Checkpoint`] (a damaged checkpoint, a
    /// folder in use), [`TrainError::Io`].
    pub(crate) fn prepare<A>(
        job: &Job<A>,
        table: &StateTable,
        options: &RunOptions<'_>,
    ) -> Result<Self, TrainError> {
        let out_dir = Path::new(&job.config.run.out_dir);
        let is_filled = is_filled(out_dir)?;
        fs::create_dir_all(out_dir).map_err(TrainError::io("create", out_dir))?;
        let lock = Arc::new(RunDir::new(out_dir).lock()?);
        lock.remove_leftovers()?;
        let source = match &options.resume {
            Resume::Fresh => None,
            Resume::Newest => lock.run().newest()?.map(|(_, path)| path),
            Resume::From(path) => Some(found(path)?),
        };
        // Links were resolved, so that a checkpoint of this folder is known as such by whatever name.
        let is_own = |path: &Path| path.parent().is_some_and(|dir| is_same(dir, lock.run().checkpoints()));
        let is_own = source.as_deref().is_some_and(is_own);
        if is_filled && !is_own && options.resume != Resume::Newest && !options.overwrite {
            return Err(TrainError::OutDirNotEmpty { path: out_dir.into() });
        }
        let Some(path) = source else {
            if options.resume == Resume::Newest {
                options.reporter.resumed(None);
            }
            return Ok(Self { step: 0, source: None, changes: Vec::new(), replaced: Replaced::All, lock });
        };
        let (reader, saved, resumed) = open(job, table, options, &path)?;
        let replaced = if is_own { Replaced::After(saved.step) } else { Replaced::All };
        let newest = lock.run().newest()?.map_or(saved.step, |(newest, _)| newest);
        if is_own && newest > saved.step && !options.overwrite {
            let dir = lock.run().checkpoints().to_owned();
            return Err(TrainError::NewerCheckpoints { dir, step: saved.step, newest });
        }
        options.reporter.resumed(Some(&resumed));
        let changes = saved.changes.into_iter().chain(resumed.changes).collect();
        Ok(Self { step: saved.step, source: Some(Arc::new(reader)), changes, replaced, lock })
    }

    /// Removes what an earlier run left and this one replaces, but never its exported model. To be called when
    /// every rank has read its part of the checkpoint.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`], [`TrainError::Io`].
    pub(crate) fn settle(&self, out_dir: &Path) -> Result<(), TrainError> {
        match self.replaced {
            Replaced::After(step) => Ok(self.lock.delete_after(step)?),
            Replaced::All => {
                self.lock.delete_after(0)?;
                REPLACED.map(|name| out_dir.join(name)).iter().try_for_each(|path| remove(path))
            }
        }
    }
}

/// A checkpoint by its true path.
fn found(path: &Path) -> Result<PathBuf, TrainError> {
    let named = |detail: String| TrainError::NoCheckpoint { path: path.to_owned(), detail };
    let true_path = fs::canonicalize(path).map_err(|source| named(source.to_string()))?;
    if true_path.join(MANIFEST_FILE).exists() {
        Ok(true_path)
    } else {
        Err(named(format!("it has no {MANIFEST_FILE}")))
    }
}

/// Opens a checkpoint and makes sure that the run can go on from it.
fn open<A>(
    job: &Job<A>,
    table: &StateTable,
    options: &RunOptions<'_>,
    path: &Path,
) -> Result<(NativeReader, RunState, Resumed), TrainError> {
    let reader = NativeReader::open(path)?;
    let saved = RunState::read(&reader)?;
    let now = RunState::of(job, saved.step, options.config_json.as_deref(), &[]);
    let changes = saved
        .changes_to(&now)
        .map_err(|differences| TrainError::OtherRun { path: path.to_owned(), differences })?;
    reader.check_tensors(table.tensors.iter().map(|tensor| &tensor.spec))?;
    let steps = job.config.train.steps;
    if saved.step > steps {
        return Err(TrainError::NothingLeft { path: path.to_owned(), done: saved.step, steps });
    }
    let resumed = Resumed { step: saved.step, path: path.to_owned(), changes };
    Ok((reader, saved, resumed))
}

/// Whether there is anything in the output folder, but for its lock and the empty folders that a run leaves when it fails
/// before its first step.
fn is_filled(out_dir: &Path) -> Result<bool, TrainError> {
    let entries = match fs::read_dir(out_dir) {
        Ok(entries) => entries,
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(source) if source.kind() == std::io::ErrorKind::NotADirectory => {
            return Err(TrainError::OutDirIsFile { path: out_dir.into() });
        }
        Err(source) => return Err(TrainError::io("open", out_dir)(source)),
    };
    for entry in entries {
        let entry = entry.map_err(TrainError::io("open", out_dir))?;
        let is_empty = || fs::read_dir(entry.path()).is_ok_and(|mut entries| entries.next().is_none());
        let name = entry.file_name();
        let is_made_first = name == RunDir::CHECKPOINTS || name == MODEL;
        if name != RunDir::LOCK_FILE && !(is_made_first && is_empty()) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn remove(path: &Path) -> Result<(), TrainError> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
            Err(TrainError::io("remove", path)(source))
        }
        _ => Ok(()),
    }
}

/// Whether two paths lead to one directory.
fn is_same(a: &Path, b: &Path) -> bool {
    let dir =
        |path: &Path| fs::canonicalize(if path.as_os_str().is_empty() { Path::new(".") } else { path }).ok();
    dir(a).is_some() && dir(a) == dir(b)
}
