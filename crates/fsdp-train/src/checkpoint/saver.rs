//! The saves of one rank: a copy of its part of the state is written, blocking the step or in the background.
//!
//! A thread writes the copy, or the rank itself where nothing else can save the state. At most one save is in progress;
//! its result is polled after every step and awaited at the end. A failed save does not end the run at once: all ranks
//! stop after the same step and try again.

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fsdp_ckpt::native::{Attempt, RankReport, RankSave, RunDir, RunLock, SavePlan, SaveSpace};
use fsdp_comm::assembly::Assembly;
use fsdp_config::WatchedLoss;
use fsdp_core::engine::Engine;
use fsdp_core::program::Program;
use fsdp_core::{Axis, Memory, Mesh, Rank};
use tempfile::TempDir;

use super::run_state::RunState;
use super::save_coordination::SaveCoordination;
use super::snapshot::Snapshot;
use super::table::StateTable;
use crate::error::TrainError;
use crate::job::Job;
use crate::wire_result;

/// The settings of a run's saves, equal on every rank.
pub(crate) struct SaveOptions {
    assembly: Arc<dyn Assembly>,
    /// The directory that receives checkpoints.
    run: RunDir,
    /// Distinguishes the names of incomplete checkpoints from those of other starts.
    attempt: Attempt,
    /// The lock that permits changes in the output folder, in the process of the first rank.
    lock: Option<Arc<RunLock>>,
    /// In the same process, the directory created because the run's own cannot be written. It is removed with the run,
    /// unless a checkpoint is committed there.
    elsewhere: Mutex<Option<(TempDir, Arc<RunLock>)>>,
    /// Which rank saves which rows.
    table: StateTable,
    /// The files of a checkpoint.
    plan: SavePlan,
    /// The bytes of these files.
    space: SaveSpace,
    /// Number of newest checkpoints to keep; `None` keeps all.
    keep_last: Option<NonZeroUsize>,
    /// Number of best checkpoints to keep in addition.
    keep_best: usize,
    /// How long ranks wait for each other.
    limit: Duration,
}

/// Topic on which the first rank announces the directory for a state that the output folder cannot hold.
const ELSEWHERE: &str = "elsewhere";

/// The destination of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Destination {
    /// The output folder.
    OutDir,
    /// A new directory in the machine's temporary folder, because the output folder cannot be written.
    Elsewhere,
}

impl SaveOptions {
    /// Creates the settings for a job, for this attempt. The process of the first rank holds the `lock` of the output
    /// folder.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`] for a model that the format cannot hold.
    pub(crate) fn new<A>(
        job: &Job<A>,
        table: StateTable,
        assembly: Arc<dyn Assembly>,
        attempt: Attempt,
        lock: Option<Arc<RunLock>>,
    ) -> Result<Self, TrainError> {
        let plan = SavePlan::new(job.plan.mesh.shards(), table.tensors.clone())?;
        let space = SaveSpace::new(&plan)?;
        let config = &job.config.checkpoint;
        Ok(Self {
            assembly,
            run: RunDir::new(&job.config.run.out_dir),
            attempt,
            lock,
            elsewhere: Mutex::default(),
            table,
            plan,
            space,
            keep_last: NonZeroUsize::new(config.keep_last),
            keep_best: config.keep_best,
            limit: Duration::from_secs_f64(job.config.run.timeout_s),
        })
    }

    /// The lock that permits changes to checkpoints. Only in the process of the first rank.
    fn lock(&self) -> &RunLock {
        self.lock.as_ref().expect("only the first rank changes what is there")
    }

    /// Reserves disk space for the next save.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`] if there is not enough.
    pub(crate) fn reserve(&self) -> Result<(), TrainError> {
        Ok(self.lock().reserve(&self.space)?)
    }

    /// Checks that there is room for a save once the checkpoints of an earlier run are removed.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`] if there is not.
    pub(crate) fn expect_room_after_clearing(&self) -> Result<(), TrainError> {
        Ok(self.lock().expect_room_after_clearing(&self.space)?)
    }

    /// The steps of the best states to keep, by evaluation loss, best first.
    pub(crate) fn best(&self, watched: &[WatchedLoss]) -> Vec<u64> {
        WatchedLoss::from_lowest(watched).iter().map(|watched| watched.step).take(self.keep_best).collect()
    }

    /// Deletes checkpoints that are not to be kept. The state after `proven` steps is known to give a sound loss.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`].
    pub(crate) fn prune(&self, proven: u64, best: &[u64]) -> Result<(), TrainError> {
        Ok(self.keep_last.map_or(Ok(()), |count| self.lock().keep_last(count, proven, best))?)
    }

    /// Removes the files of a failed save of this step, whose parts have ended on all ranks.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`].
    pub(crate) fn discard(&self, step: u64) -> Result<(), TrainError> {
        Ok(self.lock().discard(step)?)
    }

    /// The lock of a destination's directory. Only in the process of the first rank.
    fn lock_of(&self, place: Destination) -> Result<Arc<RunLock>, TrainError> {
        if place == Destination::OutDir {
            return Ok(Arc::clone(self.lock.as_ref().expect("only the first rank changes what is there")));
        }
        let mut elsewhere = locked(&self.elsewhere);
        if let Some((_, lock)) = &*elsewhere {
            return Ok(Arc::clone(lock));
        }
        let created = tempfile::Builder::new().prefix("fsdp-state-").tempdir();
        let dir = created.map_err(TrainError::io("create a directory in", std::env::temp_dir()))?;
        let lock = Arc::new(RunDir::new(dir.path()).lock()?);
        *elsewhere = Some((dir, Arc::clone(&lock)));
        Ok(lock)
    }

    /// Creates the directory of a destination if necessary, and announces it, on the first rank. The other ranks need
    /// it for their parts, which they begin after a barrier: see [`Engine::meet`].
    pub(crate) fn open(&self, place: Destination) {
        if place == Destination::OutDir {
            return;
        }
        let lock = self.lock_of(place);
        let location = |lock: &Arc<RunLock>| {
            (lock.run().out_dir().as_os_str().as_encoded_bytes().to_vec(), lock.attempt())
        };
        let location = lock.as_ref().map(location);
        // If the other ranks cannot receive this, the run has failed, which is reported elsewhere.
        let _ =
            self.assembly.announce(ELSEWHERE, wire_result::encode(location.as_ref().map_err(|error| *error)));
    }

    /// The directory of a destination, and the attempt that saves there.
    fn run_of(&self, place: Destination, shard: usize) -> Result<(RunDir, Attempt), TrainError> {
        if place == Destination::OutDir {
            return Ok((self.run.clone(), self.attempt));
        }
        if shard == 0 {
            let lock = self.lock_of(place)?;
            return Ok((lock.run().clone(), lock.attempt()));
        }
        let announced = self.assembly.hear(ELSEWHERE, self.limit)?;
        let (path, attempt): (Vec<u8>, Attempt) = wire_result::decode(&announced)?;
        Ok((RunDir::new(PathBuf::from(OsString::from_vec(path))), attempt))
    }

    /// Writes one rank's part.
    fn write(
        &self,
        shard: usize,
        snapshot: &Snapshot,
        step: u64,
        place: Destination,
    ) -> Result<RankReport, TrainError> {
        let (run, attempt) = self.run_of(place, shard)?;
        let mut save = RankSave::create(&run, attempt, &self.plan, step, shard)?;
        for (index, held) in self.table.held[shard].iter().enumerate() {
            let tensor = &self.table.tensors[held.tensor];
            save.write_rows(&tensor.spec.name, tensor.rows[shard].start, snapshot.bytes(index))?;
        }
        Ok(save.finish()?)
    }

    /// Completes a save, on the first rank: waits for all parts and gives the checkpoint its final name.
    fn commit(
        &self,
        coordination: &SaveCoordination,
        run: &RunState,
        place: Destination,
    ) -> Result<PathBuf, TrainError> {
        let lock = self.lock_of(place)?;
        let reports = coordination.reports(self.limit);
        // In these cases some rank may still be writing.
        let is_late = matches!(reports, Err(TrainError::SaveUnfinished(_)));
        let committed = reports.and_then(|all| Ok(lock.commit(&self.plan, run.step, run.to_json(), all)?));
        if committed.is_ok()
            && let (Destination::Elsewhere, Some((dir, _))) = (place, &mut *locked(&self.elsewhere))
        {
            dir.disable_cleanup(true);
        }
        if committed.is_err() && !is_late {
            // The failed save is the error to report; the next start removes any leftovers.
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

/// A complete checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    /// Steps done.
    pub step: u64,
    /// Its directory.
    pub path: PathBuf,
    /// Total bytes of its tensors.
    pub bytes: u64,
    /// Time from the copy to the commit.
    pub elapsed: Duration,
}

/// The result of a save; its error is [`TrainError::NotSaved`].
pub(crate) type Outcome = Result<Saved, TrainError>;

/// The saves of one rank.
pub(crate) struct Saver {
    options: Arc<SaveOptions>,
    /// This rank's part of the state.
    shard: usize,
    /// Number of saves begun.
    count: u64,
    snapshot: Snapshot,
    writing: Option<Writing>,
}

/// What writes a copy of the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Writer {
    /// A thread, in the background.
    Thread,
    /// The rank itself, which needs no thread, in [`Saver::save`]; the first rank completes the save in
    /// [`Saver::finish`]. In between, all ranks meet: see [`Engine::meet`].
    Rank,
}

/// A save in progress.
struct Writing {
    coordination: SaveCoordination,
    part: Part,
}

/// This rank's part of a save.
enum Part {
    /// A thread writes it.
    Thread(JoinHandle<Written>),
    /// The rank has written it; on the first rank, the save is yet to be completed.
    Written(Box<Save>),
    /// The thread could not be started: the result of the save, on the first rank.
    Failed(Option<Outcome>),
}

/// The snapshot, whose buffers the next save reuses, and on the first rank the result of the save.
type Written = (Snapshot, Option<Outcome>);

/// One save of one rank, apart from the state.
struct Save {
    options: Arc<SaveOptions>,
    coordination: SaveCoordination,
    shard: usize,
    run: RunState,
    place: Destination,
    begin: Instant,
}

impl Save {
    /// Writes this rank's part, and reports how that ended.
    fn write(&self, snapshot: &Snapshot) {
        self.coordination.report(self.options.write(self.shard, snapshot, self.run.step, self.place));
    }

    /// Waits for all parts and completes the save, on the first rank.
    fn complete(&self) -> Option<Outcome> {
        let step = self.run.step;
        let complete = || {
            let committed = self.options.commit(&self.coordination, &self.run, self.place);
            let (bytes, elapsed) = (self.options.len_bytes(), self.begin.elapsed());
            let saved = committed.map(|path| Saved { step, path, bytes, elapsed });
            saved.map_err(|error| TrainError::NotSaved { step, source: Box::new(error) })
        };
        (self.shard == 0).then(complete)
    }
}

impl Saver {
    /// Creates the saver of a rank; `None` on ranks of later replicas, which hold copies and save nothing.
    pub(crate) fn of_rank(options: &Arc<SaveOptions>, mesh: Mesh, rank: Rank) -> Option<Self> {
        let is_first_replica = mesh.coordinate(rank, Axis::Replicate) == 0;
        is_first_replica.then(|| Self {
            options: Arc::clone(options),
            shard: mesh.shard(rank),
            count: 0,
            snapshot: Snapshot::default(),
            writing: None,
        })
    }

    /// Allocates the memory for the copies of the state, so that no save lacks it.
    ///
    /// # Errors
    /// [`fsdp_core::OutOfMemory`].
    pub(crate) fn claim<M: Memory, P: Program<M>>(
        &mut self,
        engine: &Engine<M, P>,
    ) -> Result<(), TrainError> {
        self.snapshot.claim(engine, &self.options.table.held[self.shard])
    }

    /// Starts saving the state of an engine.
    ///
    /// # Errors
    /// Errors of the memory.
    ///
    /// # Panics
    /// If [`Saver::finish`] has not ended the previous save.
    pub(crate) fn save<M: Memory, P: Program<M>>(
        &mut self,
        engine: &Engine<M, P>,
        run: RunState,
        place: Destination,
        writer: Writer,
    ) -> Result<(), TrainError> {
        assert!(self.writing.is_none(), "a rank has one save at a time");
        let begin = Instant::now();
        let (options, shard) = (Arc::clone(&self.options), self.shard);
        self.snapshot.take(engine, &options.table.held[shard], run.updates(), &run.late)?;
        let snapshot = std::mem::take(&mut self.snapshot);
        let shards = options.plan.world_size();
        let coordination = SaveCoordination::begin(&options.assembly, self.count, shard, shards)?;
        self.count += 1;
        let step = run.step;
        let save = Save { options, coordination: coordination.clone(), shard, run, place, begin };
        if writer == Writer::Rank {
            save.write(&snapshot);
            self.snapshot = snapshot;
            self.writing = Some(Writing { coordination, part: Part::Written(Box::new(save)) });
            return Ok(());
        }
        let thread = std::thread::Builder::new().name(format!("save {shard}")).spawn(move || {
            save.write(&snapshot);
            (snapshot, save.complete())
        });
        let failed = |source| {
            let error = TrainError::no_thread("writes a checkpoint", &source);
            if shard > 0 {
                coordination.report(Err(error));
                return None;
            }
            Some(Err(TrainError::NotSaved { step, source: Box::new(error) }))
        };
        let part = thread.map_or_else(|source| Part::Failed(failed(source)), Part::Thread);
        self.writing = Some(Writing { coordination, part });
        Ok(())
    }

    /// Whether a save has been started and its end not yet been observed by this rank.
    pub(crate) fn is_writing(&self) -> bool {
        self.writing.is_some()
    }

    /// Returns the result of a save that has ended since the last call, on the first rank only. Does not wait for other
    /// ranks.
    pub(crate) fn poll(&mut self) -> Option<Outcome> {
        let has_ended = |writing: &Writing| match &writing.part {
            Part::Thread(thread) => thread.is_finished(),
            Part::Written(_) => false,
            Part::Failed(_) => true,
        };
        if self.writing.as_ref().is_some_and(has_ended) { self.finish() } else { None }
    }

    /// Waits for the save in progress, if any: on the first rank for the whole save, whose result it returns; on others
    /// for their own part. All ranks must have begun the save, or waiting may keep them from it: see [`Engine::meet`].
    pub(crate) fn finish(&mut self) -> Option<Outcome> {
        let written = match self.writing.take()?.part {
            Part::Thread(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Part::Written(save) => return save.complete(),
            Part::Failed(outcome) => return outcome,
        };
        self.snapshot = written.0;
        written.1
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        if let Some(Writing { coordination, part }) = self.writing.take() {
            // The run has failed elsewhere; that error is the one to report. The state being saved is valid.
            if self.shard == 0 {
                coordination.abandon_unless_all_begun();
            }
            match part {
                Part::Thread(thread) => drop(thread.join()),
                Part::Written(_) | Part::Failed(_) => {}
            }
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic cannot leave data under these locks half-changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
