//! The launcher of one rank per GPU: all in this process, or those of this process among others.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use fsdp_comm::assembly::{Assembly, AssemblyError, InMemoryAssembly};
use fsdp_comm::launch::{FailureReason, LaunchFailure, Launcher, Seat};
use fsdp_comm::process::launch::{OtherWorld, Scoped};
use fsdp_core::comm::Comm;
use fsdp_core::{Error, Rank};

use super::NcclError;
use super::comm::{NcclComm, Root};
use super::remote::Peers;
use super::watch::watch;
use super::world::World;
use crate::device::{DeviceMemory, TooManyRanks};
use crate::ffi::nccl::{Nccl, UniqueId};

/// How to run ranks on GPUs.
#[derive(Clone, Debug)]
pub struct GpuOptions {
    /// Number of devices that ranks of this process may have, one each.
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

/// Makes the memory of a rank in a world of a size, on the device of the rank's number.
type MakeMemory<M> = dyn Fn(Rank, usize) -> Result<Arc<M>, Error> + Send + Sync;

/// Launches every rank as a thread of this process with a GPU of its own, connected by NCCL.
pub struct Gpus<M> {
    nccl: Arc<Nccl>,
    options: GpuOptions,
    memory: Box<MakeMemory<M>>,
    peers: Option<Peers>,
    /// Worlds that were assembled, and launched.
    assembled: AtomicU64,
    launched: AtomicU64,
}

/// Where the first process says by which ids all are connected.
const IDS: &str = "ids";

/// All ids of NCCL are of this length.
const ID_LEN: usize = 128;

/// NCCL's ids for the communicators of a world are not there.
#[derive(Debug, thiserror::Error)]
enum NoIds {
    #[error(transparent)]
    Nccl(#[from] NcclError),
    #[error("process 0 has not told NCCL's ids: {0}")]
    NotHeard(#[from] AssemblyError),
    #[error("process 0 has told ids of {len} bytes, and two of NCCL have {}", 2 * ID_LEN)]
    Length { len: usize },
}

impl<M: DeviceMemory> Gpus<M> {
    /// Ranks whose memories are made by `memory(rank, world)`, each in its rank's thread.
    pub fn new(
        nccl: Arc<Nccl>,
        options: GpuOptions,
        memory: impl Fn(Rank, usize) -> Result<Arc<M>, Error> + Send + Sync + 'static,
    ) -> Self {
        let (assembled, launched) = Default::default();
        Self { nccl, options, memory: Box::new(memory), peers: None, assembled, launched }
    }

    /// Launches the ranks of this process, in a world of several.
    #[must_use]
    pub fn among(mut self, peers: Peers) -> Self {
        self.peers = Some(peers);
        self
    }

    /// Where the ranks of the next world that is launched come together.
    fn meeting(&self, ranks: usize) -> Arc<dyn Assembly> {
        match &self.peers {
            None => Arc::new(InMemoryAssembly::new(ranks)),
            Some(peers) => {
                let number = self.launched.fetch_add(1, Ordering::Relaxed);
                Arc::new(Scoped::new(&peers.assembly, &format!("nccl {number}")))
            }
        }
    }

    /// The ids of the communicators of the whole world: made by the first process, and told to the others.
    fn ids(&self, assembly: &dyn Assembly) -> Result<[UniqueId; 2], NoIds> {
        if assembly.is_leader() {
            let ids = [self.nccl.unique_id()?, self.nccl.unique_id()?];
            let told = ids.map(UniqueId::to_bytes).concat();
            assembly.announce(IDS, told).map_err(AssemblyError::from)?;
        }
        let told = assembly.hear(IDS, self.options.timeout)?;
        match told.as_chunks::<ID_LEN>() {
            (&[gathers, reductions], []) => Ok([gathers, reductions].map(UniqueId::from_bytes)),
            _ => Err(NoIds::Length { len: told.len() }),
        }
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
        world.meet_seated(rank)?;
        Ok(Seat { rank, memory, gathers, reductions })
    }
}

impl<M: DeviceMemory> Launcher for Gpus<M> {
    type Memory = M;

    fn ranks_on_machine(&self, world: usize) -> usize {
        self.peers.as_ref().map_or(world, |peers| peers.ranks_on_machine)
    }

    fn assemble(&self, world: usize) -> Arc<dyn Assembly> {
        let Some(peers) = &self.peers else { return Arc::new(InMemoryAssembly::new(world)) };
        let number = self.assembled.fetch_add(1, Ordering::Relaxed);
        Arc::new(Scoped::new(&peers.assembly, &format!("world {number}")))
    }

    fn launch<T: Send, E: Send + fmt::Debug + fmt::Display>(
        &self,
        ranks: usize,
        body: &(dyn Fn(Seat<M>) -> Result<T, E> + Sync),
    ) -> Result<Vec<T>, LaunchFailure<E>> {
        let assembly = self.meeting(ranks);
        let (here, there) = (assembly.local(), assembly.world());
        let failed = |rank, error: Box<dyn std::error::Error + Send + Sync>| LaunchFailure {
            rank: Rank(rank),
            reason: FailureReason::Setup(error),
        };
        if ranks != there {
            return Err(failed(here.start, OtherWorld { asked: ranks, there }.into()));
        }
        self.check(here.len()).map_err(|error| failed(here.start + error.devices, error.into()))?;
        let ids = self.ids(&*assembly).map_err(|error| failed(here.start, error.into()))?;
        let members: Arc<[Rank]> = (0..ranks).map(Rank).collect();
        let world = Arc::new(World::new(assembly, self.peers.clone(), self.options.timeout));
        let run = |rank| {
            run_rank(&world, rank, || {
                let seat = self.seat(&world, ids, &members, rank);
                body(seat.map_err(|error| FailureReason::Setup(error.into()))?).map_err(FailureReason::Error)
            })
        };
        let outcomes = thread::scope(|scope| {
            let watcher = named("NCCL watcher".to_owned()).spawn_scoped(scope, || watch(&world));
            let watcher = watcher.map_err(|error| LaunchFailure {
                rank: Rank(here.start),
                reason: FailureReason::Spawn(error),
            })?;
            let spawn = |rank: Rank| {
                let thread = named(rank.to_string()).stack_size(self.options.stack_bytes);
                thread.spawn_scoped(scope, move || run(rank)).map_err(|error| {
                    world.end_rank(rank, Some("its thread could not be started".to_owned()));
                    FailureReason::Spawn(error)
                })
            };
            let threads: Vec<_> = here.clone().map(Rank).map(spawn).collect();
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

/// The results of all ranks of this process, or the failure to report: that of the rank that failed first, or, if that one is
/// of another process, the first here.
fn report<M: DeviceMemory, T, E>(
    outcomes: Vec<Result<T, FailureReason<E>>>,
    world: &World<M>,
) -> Result<Vec<T>, LaunchFailure<E>> {
    let Some(failure) = world.failure() else {
        let results = outcomes.into_iter().map(|outcome| outcome.map_err(|_| ()));
        return Ok(results.collect::<Result<_, _>>().expect("a rank that fails tells the world"));
    };
    let here = world.assembly.local();
    let culprit = failure.culprit.0.checked_sub(here.start).filter(|&index| index < here.len());
    let Some(index) = culprit else {
        let results = here.map(Rank).zip(outcomes);
        return results
            .map(|(rank, outcome)| outcome.map_err(|reason| LaunchFailure { rank, reason }))
            .collect();
    };
    let rank = failure.culprit;
    let reason = outcomes.into_iter().nth(index).and_then(Result::err);
    Err(LaunchFailure { rank, reason: reason.unwrap_or(FailureReason::Comm(failure.error)) })
}
