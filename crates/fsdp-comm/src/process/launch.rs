//! The launcher of a world of several processes: each process runs its own ranks as threads, connected by links.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fsdp_core::comm::{Comm, CommError};
use fsdp_core::{Error, FailureKind, Memory, Rank};

use crate::assembly::{Assembly, AssemblyError};
use crate::launch::{FailureReason, LaunchFailure, Launcher, MakeMemory, Seat};
use crate::ranks::{first_failure, run_ranks};
use crate::rendezvous::Failure;
use crate::{Alarm, FlightRecorder, LinkComm, MakeLink};

/// Channels reserved per world: two for all ranks, the others for split groups.
const CHANNELS_PER_WORLD: u64 = 64;

/// Stack size of a rank's thread: enough for the deepest recursion in an unoptimized build.
const STACK_BYTES: usize = 8 << 20;

/// Launches the ranks of this process in a world of several processes.
pub struct Processes<M> {
    assembly: Arc<dyn Assembly>,
    alarm: Arc<dyn Alarm>,
    links: Arc<MakeLink>,
    memory: Box<MakeMemory<M>>,
    ranks_on_machine: usize,
    recorder: Arc<FlightRecorder>,
    /// Number of worlds assembled, and of worlds launched.
    assembled: AtomicU64,
    launched: AtomicU64,
}

/// A launch asked for a world of another size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a world of {asked} ranks was requested, but the started processes hold {there}")]
pub struct OtherWorld {
    /// Number of ranks in the launch.
    pub asked: usize,
    /// Number of ranks that the started processes hold.
    pub there: usize,
}

impl<M: Memory> Processes<M> {
    /// Creates a launcher whose ranks meet over `assembly`, communicate over `links`, and report and learn of failures
    /// through `alarm`. `memory` creates the memory of each rank, on its thread. `ranks_on_machine` is the number of
    /// ranks on this machine, over all processes. Collectives are recorded in `recorder`.
    pub fn new(
        assembly: Arc<dyn Assembly>,
        alarm: Arc<dyn Alarm>,
        links: Arc<MakeLink>,
        ranks_on_machine: usize,
        recorder: Arc<FlightRecorder>,
        memory: impl Fn(Rank, usize) -> Result<Arc<M>, Error> + Send + Sync + 'static,
    ) -> Self {
        let (assembled, launched) = Default::default();
        Self {
            assembly,
            alarm,
            links,
            memory: Box::new(memory),
            ranks_on_machine,
            recorder,
            assembled,
            launched,
        }
    }

    /// Creates the seat of a rank in world number `number`.
    fn seat<E>(&self, rank: Rank, number: u64) -> Result<Seat<M>, FailureReason<E>> {
        let comm = |channel| {
            let link = (self.links)(number * CHANNELS_PER_WORLD + channel, rank);
            LinkComm::recorded(link, Arc::clone(&self.recorder))
                .map(|comm| Comm::new(Box::new(comm)))
                .map_err(FailureReason::Comm)
        };
        let memory = (self.memory)(rank, self.assembly.world());
        let memory = memory.map_err(|error| FailureReason::Setup(error.into()))?;
        Ok(Seat { rank, memory, gathers: comm(0)?, reductions: comm(1)? })
    }
}

impl<M: Memory> Launcher for Processes<M> {
    type Memory = M;

    fn ranks_on_machine(&self, _world: usize) -> usize {
        self.ranks_on_machine
    }

    fn assemble(&self, _world: usize) -> Arc<dyn Assembly> {
        let number = self.assembled.fetch_add(1, Ordering::Relaxed);
        Arc::new(Scoped::new(&self.assembly, &format!("world {number}")))
    }

    fn launch<T: Send, E: Send + fmt::Debug + fmt::Display>(
        &self,
        world: usize,
        body: &(dyn Fn(Seat<M>) -> Result<T, E> + Sync),
    ) -> Result<Vec<T>, LaunchFailure<E>> {
        let (local, world_size) = (self.assembly.local(), self.assembly.world());
        let failed = |rank, reason| LaunchFailure { rank: Rank(rank), reason };
        if world != world_size {
            let error = OtherWorld { asked: world, there: world_size };
            return Err(failed(local.start, FailureReason::Setup(error.into())));
        }
        let number = self.launched.fetch_add(1, Ordering::Relaxed);
        let run = |rank| body(self.seat(rank, number)?).map_err(FailureReason::Error);
        let on_end = |rank, reason: Option<&FailureReason<E>>| {
            if let Some(reason) = reason {
                self.alarm.raise(CommError::PeerFailed { rank, reason: reason.to_string() });
            }
        };
        let outcomes = run_ranks(local.clone(), STACK_BYTES, run, on_end);
        let has_local_failure = outcomes.iter().any(Result::is_err);
        let failure = self.alarm.raised().filter(|_| has_local_failure).and_then(|error| match error {
            CommError::PeerFailed { rank, .. } => Some(Failure { culprit: rank, error }),
            _ => None,
        });
        first_failure(local, outcomes, failure)
    }
}

/// The assembly of one of several worlds of the same processes: it prefixes all topics with a name.
pub struct Scoped {
    inner: Arc<dyn Assembly>,
    prefix: String,
}

impl Scoped {
    /// Restricts `inner` to the topics that begin with `name`.
    pub fn new(inner: &Arc<dyn Assembly>, name: &str) -> Self {
        Self { inner: Arc::clone(inner), prefix: format!("{name}: ") }
    }

    fn topic(&self, topic: &str) -> String {
        format!("{}{topic}", self.prefix)
    }
}

impl Assembly for Scoped {
    fn world(&self) -> usize {
        self.inner.world()
    }

    fn local(&self) -> Range<usize> {
        self.inner.local()
    }

    fn give(&self, topic: &str, rank: Rank, value: Vec<u8>) -> Result<(), CommError> {
        self.inner.give(&self.topic(topic), rank, value)
    }

    fn given(&self, topic: &str) -> usize {
        self.inner.given(&self.topic(topic))
    }

    fn collect(&self, topic: &str, ranks: usize, limit: Duration) -> Result<Vec<Vec<u8>>, AssemblyError> {
        self.inner.collect(&self.topic(topic), ranks, limit)
    }

    fn announce(&self, topic: &str, value: Vec<u8>) -> Result<(), CommError> {
        self.inner.announce(&self.topic(topic), value)
    }

    fn hear(&self, topic: &str, limit: Duration) -> Result<Vec<u8>, AssemblyError> {
        self.inner.hear(&self.topic(topic), limit)
    }

    fn fail(&self, rank: Rank, kind: FailureKind, cause: String) {
        self.inner.fail(rank, kind, cause);
    }

    fn give_up(&self, topic: &str) {
        self.inner.give_up(&self.topic(topic));
    }
}
