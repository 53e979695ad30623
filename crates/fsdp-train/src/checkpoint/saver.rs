//! One rank's saves: a copy of its part of the state is written, in the step or behind the steps that follow.
//!
//! Writing is the business of a thread. At most one save is under way. How it ended is asked for after every step and
//! at the end. A save that failed does not end the run at once: all ranks stop together, and try again.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fsdp_ckpt::native::{RankReport, RankSave, RunDir, RunLock, SavePlan, SaveSpace};
use fsdp_core::engine::Engine;
use fsdp_core::program::Program;
use fsdp_core::{Memory, Mesh, Rank};
use tempfile::TempDir;

use super::meeting::{Meeting, Outcome};
use super::run_state::RunState;
use super::snapshot::Snapshot;
use super::table::StateTable;
use crate::error::TrainError;
use crate::job::Job;

/// How a run saves, the same on every rank.
pub(crate) struct SaveOptions {
    /// The right to write checkpoints.
    lock: Arc<RunLock>,
    /// The same for a directory that is made when the run's own can not be written. It goes with the run, unless a
    /// checkpoint is committed there.
    elsewhere: Mutex<Option<(TempDir, Arc<RunLock>)>>,
    /// What is saved by whom.
    table: StateTable,
    /// Its files.
    plan: SavePlan,
    /// Their bytes.
    space: SaveSpace,
    /// Checkpoints to keep, if not all.
    keep_last: Option<NonZeroUsize>,
    /// How long ranks wait for each other.
    limit: Duration,
    /// Saves that not every rank has begun, by number.
    meetings: Mutex<BTreeMap<u64, Arc<Meeting>>>,
}

/// Where a checkpoint goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// To the output folder.
    OutDir,
    /// To a new directory among the temporary files of the machine, because the output folder can not be written.
    Elsewhere,
}

impl SaveOptions {
    /// The saves of a job whose output folder is locked.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`] for a model that the format can not hold.
    pub(crate) fn new<A>(job: &Job<A>, table: StateTable, lock: Arc<RunLock>) -> Result<Self, TrainError> {
        let plan = SavePlan::new(job.plan.mesh.shards(), table.tensors.clone())?;
        let space = SaveSpace::new(&plan)?;
        let config = &job.config.checkpoint;
        Ok(Self {
            lock,
            elsewhere: Mutex::default(),
            table,
            plan,
            space,
            keep_last: NonZeroUsize::new(config.keep_last),
            limit: Duration::from_secs_f64(job.config.run.timeout_s),
            meetings: Mutex::default(),
        })
    }

    /// Sets disk space aside for the next save.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`]: there is not enough.
    pub(crate) fn reserve(&self) -> Result<(), TrainError> {
        Ok(self.lock.reserve(&self.space)?)
    }

    /// Makes sure that there is room for a save once the checkpoints of an earlier run are removed.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`]: there is not.
    pub(crate) fn expect_room_after_clearing(&self) -> Result<(), TrainError> {
        Ok(self.lock.expect_room_after_clearing(&self.space)?)
    }

    /// Removes checkpoints that are not to be kept. The state after `proven` steps is known to give a finite loss.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`].
    pub(crate) fn prune(&self, proven: u64) -> Result<(), TrainError> {
        Ok(self.keep_last.map_or(Ok(()), |count| self.lock.keep_last(count, proven))?)
    }

    /// Removes what a save of this step has left that failed and that all ranks have ended.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`].
    pub(crate) fn discard(&self, step: u64) -> Result<(), TrainError> {
        Ok(self.lock.discard(step)?)
    }

    /// The save of this number, begun by the first rank that asks.
    fn join(&self, number: u64, step: u64) -> Arc<Meeting> {
        let mut meetings = locked(&self.meetings);
        let new = || Arc::new(Meeting::new(step, self.plan.world_size()));
        let meeting = Arc::clone(meetings.entry(number).or_insert_with(new));
        if meeting.begin() {
            meetings.remove(&number);
        }
        meeting
    }

    fn lock_of(&self, place: Place) -> Result<Arc<RunLock>, TrainError> {
        if place == Place::OutDir {
            return Ok(Arc::clone(&self.lock));
        }
        let mut elsewhere = locked(&self.elsewhere);
        if let Some((_, lock)) = &*elsewhere {
            return Ok(Arc::clone(lock));
        }
        let made = tempfile::Builder::new().prefix("fsdp-state-").tempdir();
        let dir = made.map_err(TrainError::io("create a directory in", std::env::temp_dir()))?;
        let lock = Arc::new(RunDir::new(dir.path()).lock()?);
        *elsewhere = Some((dir, Arc::clone(&lock)));
        Ok(lock)
    }

    /// Writes one rank's part.
    fn write(
        &self,
        shard: usize,
        snapshot: &Snapshot,
        step: u64,
        place: Place,
    ) -> Result<RankReport, TrainError> {
        let lock = self.lock_of(place)?;
        let mut save = RankSave::create(lock.run(), &self.plan, step, shard)?;
        for (index, held) in self.table.held[shard].iter().enumerate() {
            let tensor = &self.table.tensors[held.tensor];
            save.write_rows(&tensor.spec.name, tensor.rows[shard].start, snapshot.bytes(index))?;
        }
        Ok(save.finish()?)
    }

    /// What the first rank does besides: waits for all parts and gives the checkpoint its name.
    fn commit(&self, meeting: &Meeting, run: &RunState, place: Place) -> Result<PathBuf, TrainError> {
        let lock = self.lock_of(place)?;
        let reports = meeting.reports(self.limit);
        // Then some rank may still be writing.
        let is_late = matches!(reports, Err(TrainError::SaveLate { .. } | TrainError::SaveAbandoned));
        let committed = reports.and_then(|all| Ok(lock.commit(&self.plan, run.step, run.to_json(), all)?));
        if committed.is_ok()
            && let (Place::Elsewhere, Some((dir, _))) = (place, &mut *locked(&self.elsewhere))
        {
            dir.disable_cleanup(true);
        }
        if committed.is_err() && !is_late {
            // The failure of the save is the one to report; the next start removes what is left.
            let _ = lock.discard(run.step);
        }
        committed
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
    /// Saves begun.
    count: u64,
    snapshot: Snapshot,
    writing: Option<Writing>,
}

/// A save under way.
struct Writing {
    meeting: Arc<Meeting>,
    /// Gives the copy back, whose buffers the next save uses. None if it could not be started.
    thread: Option<JoinHandle<Snapshot>>,
}

impl Saver {
    /// The saves of a rank; ranks of later replicas hold copies and save nothing.
    pub(crate) fn of_rank(options: &Arc<SaveOptions>, mesh: Mesh, rank: Rank) -> Option<Self> {
        let is_first_replica = mesh.replica_of(rank) == 0;
        is_first_replica.then(|| Self {
            options: Arc::clone(options),
            shard: mesh.shard_of(rank),
            count: 0,
            snapshot: Snapshot::default(),
            writing: None,
        })
    }

    /// Begins to save the state of an engine.
    ///
    /// # Errors
    /// Those of the memory.
    ///
    /// # Panics
    /// When a former save was not ended by [`Saver::finish`].
    pub(crate) fn save<M: Memory, P: Program<M>>(
        &mut self,
        engine: &Engine<M, P>,
        run: RunState,
        place: Place,
    ) -> Result<(), TrainError> {
        assert!(self.writing.is_none(), "a rank has one save at a time");
        let begin = Instant::now();
        let (options, shard) = (Arc::clone(&self.options), self.shard);
        self.snapshot.take(engine, &options.table.held[shard], run.step)?;
        let snapshot = std::mem::take(&mut self.snapshot);
        let meeting = options.join(self.count, run.step);
        self.count += 1;
        let end = EndOnPanic(Arc::clone(&meeting));
        let write = move || {
            let EndOnPanic(meeting) = &end;
            meeting.report(shard, options.write(shard, &snapshot, run.step, place));
            if shard == 0 {
                let committed = options.commit(meeting, &run, place);
                let (step, bytes, elapsed) = (run.step, options.len_bytes(), begin.elapsed());
                meeting.decide(committed.map(|path| Saved { step, path, bytes, elapsed }));
            }
            snapshot
        };
        let thread = std::thread::Builder::new().name(format!("save {shard}")).spawn(write);
        let failed = |source| meeting.decide(Err(TrainError::SaveThread { source }));
        self.writing = Some(Writing { thread: thread.map_err(failed).ok(), meeting });
        Ok(())
    }

    /// Whether a save is under way, as far as this rank has asked.
    pub(crate) fn is_writing(&self) -> bool {
        self.writing.is_some()
    }

    /// How the save ended that ended since the last call, if one did. Does not wait for other ranks.
    pub(crate) fn poll(&mut self) -> Option<Outcome> {
        let has_ended = self.writing.as_ref().is_some_and(|writing| writing.meeting.has_ended());
        if has_ended { self.finish() } else { None }
    }

    /// Waits for the save under way, if there is one. All ranks must have begun it, or waiting may keep them from
    /// it: see [`Engine::meet`].
    pub(crate) fn finish(&mut self) -> Option<Outcome> {
        let Writing { meeting, thread } = self.writing.take()?;
        if let Some(thread) = thread {
            self.snapshot = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
        Some(meeting.outcome())
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        if let Some(Writing { meeting, thread }) = self.writing.take() {
            // The run has failed elsewhere; that error is the one to report. What is being saved is sound.
            meeting.abandon_unless_all_begun();
            let _ = thread.map(JoinHandle::join);
        }
    }
}

/// Ends a save whose thread panics, so that nobody waits for it.
struct EndOnPanic(Arc<Meeting>);

impl Drop for EndOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.decide(Err(TrainError::SaveAbandoned));
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change under these locks is complete before anything can panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
