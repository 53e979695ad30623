//! The launcher of one rank per GPU, for all ranks of a world, or for those of one process among several.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use fsdp_comm::assembly::{Assembly, AssemblyError, InMemoryAssembly};
use fsdp_comm::launch::{FailureReason, LaunchFailure, Launcher, MakeMemory, Seat};
use fsdp_comm::process::launch::{OtherWorld, Scoped};
use fsdp_comm::ranks::{first_failure, run_ranks};
use fsdp_comm::rendezvous::Group;
use fsdp_core::comm::Comm;
use fsdp_core::{Error, Rank};

use super::NcclError;
use super::comm::NcclComm;
use super::remote::Peers;
use super::watch::watch;
use super::world::World;
use crate::device::{DeviceMemory, TooManyRanks};
use crate::ffi::nccl::{Nccl, UniqueId};

/// Options of ranks on GPUs.
#[derive(Clone, Debug)]
pub struct GpuOptions {
    /// Number of devices for the ranks of this process, one each.
    pub devices: usize,
    /// The world fails if a collective has been at the head of its communicator for this long; must be longer than a
    /// step.
    pub timeout: Duration,
}

impl GpuOptions {
    /// Stack size of each rank's thread: NVIDIA's libraries, such as cuBLASLt and cuDNN when they plan, run on the
    /// caller's stack. Twice the stack of a process's main thread; untouched pages cost nothing.
    pub const STACK_BYTES: usize = 16 << 20;

    /// Options with `devices` devices and a timeout of ten minutes.
    pub fn new(devices: usize) -> Self {
        Self { devices, timeout: Duration::from_secs(600) }
    }
}

/// Launches every rank as a thread of this process with its own GPU, connected by NCCL.
pub struct Gpus<M> {
    nccl: Arc<Nccl>,
    options: GpuOptions,
    memory: Box<MakeMemory<M>>,
    peers: Option<Peers>,
    /// Number of worlds assembled, and of worlds launched.
    assembled: AtomicU64,
    launched: AtomicU64,
}

/// The topic in which the leader announces the ids of the communicators.
const IDS_TOPIC: &str = "ids";

/// Why NCCL's ids for the communicators of a world are not available.
#[derive(Debug, thiserror::Error)]
enum NoIds {
    #[error(transparent)]
    Nccl(#[from] NcclError),
    #[error("process 0 did not send NCCL ids: {0}")]
    NoAnswer(#[from] AssemblyError),
    #[error("process 0 sent NCCL ids of {len} bytes, expected {}", 2 * UniqueId::LEN)]
    Length { len: usize },
}

impl<M: DeviceMemory> Gpus<M> {
    /// Creates a launcher; `memory(rank, world)` creates the memory of each rank, on its thread.
    pub fn new(
        nccl: Arc<Nccl>,
        options: GpuOptions,
        memory: impl Fn(Rank, usize) -> Result<Arc<M>, Error> + Send + Sync + 'static,
    ) -> Self {
        let (assembled, launched) = Default::default();
        Self { nccl, options, memory: Box::new(memory), peers: None, assembled, launched }
    }

    /// Makes this launcher run the ranks of one process in a world of several.
    #[must_use]
    pub fn among(mut self, peers: Peers) -> Self {
        self.peers = Some(peers);
        self
    }

    /// The assembly of the next world, for one purpose.
    fn next_assembly(&self, ranks: usize, purpose: &str, count: &AtomicU64) -> Arc<dyn Assembly> {
        let Some(peers) = &self.peers else { return Arc::new(InMemoryAssembly::new(ranks)) };
        let number = count.fetch_add(1, Ordering::Relaxed);
        Arc::new(Scoped::new(&peers.assembly, &format!("{purpose} {number}")))
    }

    /// The ids of the world's communicators: created by the leader and announced to the other processes.
    fn ids(&self, assembly: &dyn Assembly) -> Result<[UniqueId; 2], NoIds> {
        if assembly.is_leader() {
            let ids = [self.nccl.unique_id()?, self.nccl.unique_id()?];
            let id_bytes = ids.map(|id| id.0).concat();
            assembly.announce(IDS_TOPIC, id_bytes).map_err(AssemblyError::from)?;
        }
        let id_bytes = assembly.hear(IDS_TOPIC, self.options.timeout)?;
        match id_bytes.as_chunks::<{ UniqueId::LEN }>() {
            (&[gathers, reductions], []) => Ok([gathers, reductions].map(UniqueId)),
            _ => Err(NoIds::Length { len: id_bytes.len() }),
        }
    }

    /// Checks that there is a device for each of `ranks` ranks.
    ///
    /// # Errors
    /// [`TooManyRanks`].
    pub fn check(&self, ranks: usize) -> Result<(), TooManyRanks> {
        match self.options.devices {
            devices if ranks > devices => Err(TooManyRanks { ranks, devices }),
            _ => Ok(()),
        }
    }

    /// Creates a rank's memory and communicators.
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
        let connect = |number, name, id| {
            let group = Group::root(number, name, members);
            NcclComm::connect(world, &self.nccl, group, id, rank).map(|comm| Comm::new(Box::new(comm)))
        };
        let [gathers, reductions] = ids;
        let gathers = connect(0, "gathers", gathers)?;
        let reductions = connect(1, "reductions", reductions)?;
        world.wait_until_seated(rank)?;
        Ok(Seat { rank, memory, gathers, reductions })
    }
}

impl<M: DeviceMemory> Launcher for Gpus<M> {
    type Memory = M;

    fn ranks_on_machine(&self, world: usize) -> usize {
        self.peers.as_ref().map_or(world, |peers| peers.ranks_on_machine)
    }

    fn assemble(&self, world: usize) -> Arc<dyn Assembly> {
        self.next_assembly(world, "world", &self.assembled)
    }

    fn launch<T: Send, E: Send + fmt::Debug + fmt::Display>(
        &self,
        ranks: usize,
        body: &(dyn Fn(Seat<M>) -> Result<T, E> + Sync),
    ) -> Result<Vec<T>, LaunchFailure<E>> {
        let assembly = self.next_assembly(ranks, "nccl", &self.launched);
        let (local_ranks, world_size) = (assembly.local(), assembly.world());
        let failed = |rank, error: Box<dyn std::error::Error + Send + Sync>| LaunchFailure {
            rank: Rank(rank),
            reason: FailureReason::Setup(error),
        };
        if ranks != world_size {
            return Err(failed(local_ranks.start, OtherWorld { asked: ranks, there: world_size }.into()));
        }
        self.check(local_ranks.len())
            .map_err(|error| failed(local_ranks.start + error.devices, error.into()))?;
        let ids = self.ids(&*assembly).map_err(|error| failed(local_ranks.start, error.into()))?;
        let members: Arc<[Rank]> = (0..ranks).map(Rank).collect();
        let world = Arc::new(World::new(assembly, self.peers.clone(), self.options.timeout));
        let run = |rank| {
            let seat = self.seat(&world, ids, &members, rank);
            body(seat.map_err(|error| FailureReason::Setup(error.into()))?).map_err(FailureReason::Error)
        };
        let ended =
            |rank, reason: Option<&FailureReason<E>>| world.end_rank(rank, reason.map(ToString::to_string));
        let outcomes = thread::scope(|scope| {
            let watcher = thread::Builder::new().name("NCCL watcher".to_owned());
            let watcher = watcher.spawn_scoped(scope, || watch(&world)).map_err(|error| LaunchFailure {
                rank: Rank(local_ranks.start),
                reason: FailureReason::Spawn(error),
            })?;
            let outcomes = run_ranks(local_ranks.clone(), GpuOptions::STACK_BYTES, run, ended);
            world.stop();
            watcher.join().expect("the watcher does not panic");
            Ok(outcomes)
        });
        first_failure(local_ranks, outcomes?, world.failure())
    }
}
