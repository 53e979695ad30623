//! One rank's saves: a copy of its part of the state is written, in the step or behind the steps that follow.
//!
//! Writing is the business of a thread. At most one save is under way. Its outcome is asked for after every step and
//! at the end: an error in it ends the run, on this rank with its reason and on the others because this one is gone.
//! The rank that commits (the first) waits for the others in the directory of the checkpoint, never on a
//! communicator, so a save can not disturb or deadlock a step.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fsdp_ckpt::native::{RankSave, RunLock, SavePlan, WaitLimit};
use fsdp_core::engine::Engine;
use fsdp_core::program::Program;
use fsdp_core::{Memory, Mesh, Rank};

use super::run_state::RunState;
use super::snapshot::Snapshot;
use super::table::StateTable;
use crate::error::TrainError;
use crate::job::Job;

/// How a run saves, the same on every rank.
#[derive(Debug)]
pub(crate) struct SaveOptions {
    /// The right to write checkpoints.
    lock: Arc<RunLock>,
    /// What is saved by whom.
    table: StateTable,
    /// Its files.
    plan: SavePlan,
    /// Checkpoints to keep, if not all.
    keep_last: Option<NonZeroUsize>,
    /// How long ranks wait for each other.
    limit: Duration,
}

impl SaveOptions {
    /// The saves of a job whose output folder is locked.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`] for a model that the format can not hold.
    pub(crate) fn new<A>(job: &Job<A>, table: StateTable, lock: Arc<RunLock>) -> Result<Self, TrainError> {
        let plan = SavePlan::new(job.plan.mesh.shards(), table.tensors.clone())?;
        let config = &job.config.checkpoint;
        Ok(Self {
            lock,
            table,
            plan,
            keep_last: NonZeroUsize::new(config.keep_last),
            limit: Duration::from_secs_f64(job.config.run.timeout_s),
        })
    }

    /// Writes one rank's part; the first rank commits, the others wait for it.
    fn write(
        &self,
        shard: usize,
        snapshot: &Snapshot,
        run: &RunState,
        cancel: &AtomicBool,
    ) -> Result<PathBuf, TrainError> {
        let mut save = RankSave::create(self.lock.run(), &self.plan, run.step, shard)?;
        for (index, held) in self.table.held[shard].iter().enumerate() {
            let tensor = &self.table.tensors[held.tensor];
            save.write_rows(&tensor.spec.name, tensor.rows[shard].start, snapshot.bytes(index))?;
        }
        let done = save.finish()?;
        let limit = WaitLimit { limit: self.limit, stop: cancel };
        if shard > 0 {
            return Ok(done.wait(limit)?);
        }
        let path = self.lock.commit(&self.plan, run.step, run.to_json(), limit)?;
        if let Some(count) = self.keep_last {
            self.lock.keep_last(count)?;
        }
        Ok(path)
    }

    /// Bytes of all tensors.
    fn len_bytes(&self) -> u64 {
        let len = |shape: &[usize]| shape.iter().map(|&size| size as u64).product::<u64>();
        let tensors = self.table.tensors.iter().map(|tensor| &tensor.spec);
        tensors.map(|spec| len(&spec.shape) * spec.dtype.size_bytes() as u64).sum()
    }
}

/// A checkpoint that is complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    /// Steps done.
    pub step: u64,
    /// The checkpoint.
    pub path: PathBuf,
    /// Bytes of all its tensors.
    pub bytes: u64,
    /// From the copy to the commit.
    pub elapsed: Duration,
}

/// The saves of one rank.
pub(crate) struct Saver {
    options: Arc<SaveOptions>,
    /// Which part of the state this rank saves.
    shard: usize,
    state: State,
    cancel: Arc<AtomicBool>,
}

enum State {
    Idle(Snapshot),
    Writing(JoinHandle<(Snapshot, Result<Saved, TrainError>)>),
    /// A save failed or panicked; the run is about to end.
    Failed,
}

impl Saver {
    /// The saves of a rank; ranks of later replicas hold copies and save nothing.
    pub(crate) fn of_rank(options: &Arc<SaveOptions>, mesh: Mesh, rank: Rank) -> Option<Self> {
        let is_first_replica = mesh.replica_of(rank) == 0;
        is_first_replica.then(|| Self {
            options: Arc::clone(options),
            shard: mesh.shard_of(rank),
            state: State::Idle(Snapshot::default()),
            cancel: Arc::new(AtomicBool::new(false)),
        })
    }

    /// Begins to save the state of an engine. Returns the former checkpoint, if it was not told of yet.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`], also that of a former save.
    pub(crate) fn save<M: Memory, P: Program<M>>(
        &mut self,
        engine: &Engine<M, P>,
        run: &RunState,
    ) -> Result<Option<Saved>, TrainError> {
        let complete = self.finish()?;
        let State::Idle(mut snapshot) = std::mem::replace(&mut self.state, State::Failed) else {
            unreachable!("a save that has ended leaves the saver idle or returns its error");
        };
        let start = Instant::now();
        snapshot.take(engine, &self.options.table.held[self.shard], run.step)?;
        let (options, shard, cancel) = (Arc::clone(&self.options), self.shard, Arc::clone(&self.cancel));
        let run = run.clone();
        let write = move || {
            let written = options.write(shard, &snapshot, &run, &cancel);
            let (bytes, elapsed) = (options.len_bytes(), start.elapsed());
            (snapshot, written.map(|path| Saved { step: run.step, path, bytes, elapsed }))
        };
        let thread = std::thread::Builder::new().name(format!("save {}", self.shard));
        let thread = thread.spawn(write).map_err(|source| TrainError::SaveThread { source })?;
        self.state = State::Writing(thread);
        Ok(complete)
    }

    /// The checkpoint that became complete since the last call, if any. Does not wait.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`] of the save.
    pub(crate) fn poll(&mut self) -> Result<Option<Saved>, TrainError> {
        match &self.state {
            State::Writing(thread) if thread.is_finished() => self.finish(),
            _ => Ok(None),
        }
    }

    /// Waits for the save under way, if there is one. All ranks must have begun it, or waiting may keep them from
    /// it: see [`Engine::meet`].
    ///
    /// # Errors
    /// As [`Saver::poll`].
    pub(crate) fn finish(&mut self) -> Result<Option<Saved>, TrainError> {
        match std::mem::replace(&mut self.state, State::Failed) {
            State::Writing(thread) => {
                let (snapshot, result) =
                    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                let saved = result?;
                self.state = State::Idle(snapshot);
                Ok(Some(saved))
            }
            other => {
                self.state = other;
                Ok(None)
            }
        }
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        if let State::Writing(thread) = std::mem::replace(&mut self.state, State::Failed) {
            // The run has failed elsewhere; that error is the one to report.
            self.cancel.store(true, Ordering::Relaxed);
            let _ = thread.join();
        }
    }
}
