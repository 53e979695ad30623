//! The launcher of one rank per GPU, all in this process.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use fsdp_comm::launch::{FailureReason, LaunchFailure, Launcher, Seat};
use fsdp_core::comm::Comm;
use fsdp_core::{Error, Rank};

use super::comm::{NcclComm, Root};
use super::watch::watch;
use super::world::World;
use crate::device::DeviceMemory;
use crate::ffi::nccl::{Nccl, UniqueId};

/// How to run ranks on GPUs.
#[derive(Clone, Debug)]
pub struct GpuOptions {
    /// Number of devices; rank r runs on device r.
    pub devices: usize,
    /// The world fails when a collective has been at the head of its communicator for so long, so it must be longer than
    /// a step.
    pub timeout: Duration,
    /// Stack of each rank's thread.
    pub stack_bytes: usize,
}

impl GpuOptions {
    /// Room for what NVIDIA's libraries do on the stack of whoever calls them: cuBLASLt and cuDNN plan there. Twice what the
    /// first thread of a process has; pages that are not touched cost nothing.
    pub const STACK_BYTES: usize = 16 << 20;

    /// `devices` devices and a time limit of ten minutes.
    pub fn new(devices: usize) -> Self {
        Self { devices, timeout: Duration::from_secs(600), stack_bytes: Self::STACK_BYTES }
    }
}

/// There is no device for some of the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{ranks} ranks need {ranks} GPUs, but this machine has {devices}: use fewer ranks (run.ranks, --ranks or \
     --world-sizes), let them share one GPU (run.share_gpu = true), or make more visible (CUDA_VISIBLE_DEVICES)"
)]
pub struct TooManyRanks {
    /// Ranks asked for.
    pub ranks: usize,
    /// Devices found.
    pub devices: usize,
}

/// Makes the memory of a rank in a world of a size, on the device of the rank's number.
type MakeMemory<M> = dyn Fn(Rank, usize) -> Result<Arc<M>, Error> + Send + Sync;

/// Launches every rank as a thread of this process with a GPU of its own, connected by NCCL.
pub struct Gpus<M> {
    nccl: Arc<Nccl>,
    options: GpuOptions,
    memory: Box<MakeMemory<M>>,
}

impl<M: DeviceMemory> Gpus<M> {
    /// Ranks whose memories are made by `memory(rank, world)`, each in its rank's thread.
    pub fn new(
        nccl: Arc<Nccl>,
        options: GpuOptions,
        memory: impl Fn(Rank, usize) -> Result<Arc<M>, Error> + Send + Sync + 'static,
    ) -> Self {
        Self { nccl, options, memory: Box::new(memory) }
    }

    /// Whether there is a device for each of `ranks` ranks.
    ///
    /// # Errors
    /// [`TooManyRanks`].
    pub fn check(&self, ranks: usize) -> Result<(), TooManyRanks> {
        match self.options.devices {
            devices if ranks > devices => Err(TooManyRanks { ranks, devices }),
            _ => Ok(()),
        }
    }

    /// Makes a rank's memory and communicators.
    fn seat(
        &self,
        world: &Arc<World<M>>,
        ids: [UniqueId; 2],
        members: &Arc<[Rank]>,
        rank: Rank,
    ) -> Result<Seat<M>, Error> {
        let memory = (self.memory)(rank, members.len())?;
        memory.bind()?;
        world.add_memory(rank, memory.clone());
        let connect = |root, id| NcclComm::connect(world, &self.nccl, root, id, members, rank);
        let [gathers, reductions] = ids;
        let gathers = Comm::new(Box::new(connect(Root::Gathers, gathers)?));
        let reductions = Comm::new(Box::new(connect(Root::Reductions, reductions)?));
        world.meet_seated()?;
        Ok(Seat { rank, memory, gathers, reductions })
    }
}

impl<M: DeviceMemory> Launcher for Gpus<M> {
    type Memory = M;

    fn launch<T: Send, E: Send + fmt::Debug + fmt::Display>(
        &self,
        ranks: usize,
        body: &(dyn Fn(Seat<M>) -> Result<T, E> + Sync),
    ) -> Result<Vec<T>, LaunchFailure<E>> {
        let failed = |rank, source| LaunchFailure { rank, reason: FailureReason::Setup(source) };
        self.check(ranks).map_err(|error| failed(Rank(error.devices), error.into()))?;
        let id = || self.nccl.unique_id().map_err(|error| failed(Rank(0), error.into()));
        let ids = [id()?, id()?];
        let members: Arc<[Rank]> = (0..ranks).map(Rank).collect();
        let world = Arc::new(World::new(ranks, self.options.timeout));
        let run = |rank| {
            run_rank(&world, rank, || {
                let seat = self.seat(&world, ids, &members, rank);
                body(seat.map_err(|error| FailureReason::Setup(error.into()))?).map_err(FailureReason::Error)
            })
        };
        let outcomes = thread::scope(|scope| {
            let watcher = named("NCCL watcher".to_owned()).spawn_scoped(scope, || watch(&world));
            let watcher = watcher
                .map_err(|error| LaunchFailure { rank: Rank(0), reason: FailureReason::Spawn(error) })?;
            let spawn = |&rank: &Rank| {
                let thread = named(rank.to_string()).stack_size(self.options.stack_bytes);
                thread.spawn_scoped(scope, move || run(rank)).map_err(|error| {
                    world.end_rank(rank, Some("its thread could not be started".to_owned()));
                    FailureReason::Spawn(error)
                })
            };
            let threads: Vec<_> = members.iter().map(spawn).collect();
            let join = |thread: thread::ScopedJoinHandle<'_, _>| thread.join().expect("panics are caught");
            let outcomes = threads.into_iter().map(|thread| thread.and_then(join)).collect();
            world.stop();
            watcher.join().expect("the watcher does not panic");
            Ok(outcomes)
        });
        report(outcomes?, &world)
    }
}

fn named(name: String) -> thread::Builder {
    thread::Builder::new().name(name)
}

/// Runs one rank to its end and tells the others about it.
fn run_rank<M: DeviceMemory, T, E: fmt::Display>(
    world: &World<M>,
    rank: Rank,
    body: impl FnOnce() -> Result<T, FailureReason<E>>,
) -> Result<T, FailureReason<E>> {
    let outcome = catch_unwind(AssertUnwindSafe(body))
        .unwrap_or_else(|panic| Err(FailureReason::Panic(panic_message(panic.as_ref()))));
    world.end_rank(rank, outcome.as_ref().err().map(ToString::to_string));
    outcome
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

/// The results of all ranks, or the first failure.
fn report<M: DeviceMemory, T, E>(
    outcomes: Vec<Result<T, FailureReason<E>>>,
    world: &World<M>,
) -> Result<Vec<T>, LaunchFailure<E>> {
    let Some(failure) = world.failure() else {
        let results = outcomes.into_iter().map(|outcome| outcome.map_err(|_| ()));
        return Ok(results.collect::<Result<_, _>>().expect("a rank that fails tells the world"));
    };
    let rank = failure.culprit;
    let reason = outcomes.into_iter().nth(rank.0).and_then(Result::err);
    Err(LaunchFailure { rank, reason: reason.unwrap_or(FailureReason::Comm(failure.error)) })
}
