//! The launcher of ranks that live in several processes: each process runs its own, as threads, over links.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use fsdp_core::comm::{Comm, CommError};
use fsdp_core::{Error, FailureKind, Memory, Rank};

use crate::assembly::{Assembly, AssemblyError};
use crate::launch::{FailureReason, LaunchFailure, Launcher, Seat};
use crate::{Alarm, FlightRecorder, LinkComm, MakeLink};

/// Channels of one world: two of all ranks, and those that are split off.
const CHANNELS_PER_WORLD: u64 = 64;

/// Enough for the deepest recursion of a rank, which is that of an unoptimized build.
const STACK_BYTES: usize = 8 << 20;

/// Makes the memory of a rank in a world of a size.
pub type MakeMemory<M> = dyn Fn(Rank, usize) -> Result<Arc<M>, Error> + Send + Sync;

/// The ranks of this process, in a world of several.
pub struct Processes<M> {
    assembly: Arc<dyn Assembly>,
    alarm: Arc<dyn Alarm>,
    links: Arc<MakeLink>,
    memory: Box<MakeMemory<M>>,
    ranks_on_machine: usize,
    recorder: Arc<FlightRecorder>,
    /// Worlds that were assembled, and launched.
    assembled: AtomicU64,
    launched: AtomicU64,
}

/// A world of another size than there are ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a world of {asked} ranks was asked for, and the processes that were started hold {there}")]
pub struct OtherWorld {
    /// Ranks that were asked for.
    pub asked: usize,
    /// Ranks that there are.
    pub there: usize,
}

impl<M: Memory> Processes<M> {
    /// Ranks that come together over `assembly`, talk over `links`, tell and hear failures by `alarm`, and have the memory
    /// that `memory` makes in each rank's thread; of all ranks so many are on this machine. Their collectives are recorded.
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

    /// One rank, from its communicators to its end.
    fn rank<T, E: fmt::Display>(
        &self,
        rank: Rank,
        number: u64,
        body: &(dyn Fn(Seat<M>) -> Result<T, E> + Sync),
    ) -> Result<T, FailureReason<E>> {
        let run = || {
            let comm = |channel| {
                let link = (self.links)(number * CHANNELS_PER_WORLD + channel, rank);
                LinkComm::recorded(link, Arc::clone(&self.recorder))
                    .map(|comm| Comm::new(Box::new(comm)))
                    .map_err(FailureReason::Comm)
            };
            let memory = (self.memory)(rank, self.assembly.world());
            let memory = memory.map_err(|error| FailureReason::Setup(error.into()))?;
            let seat = Seat { rank, memory, gathers: comm(0)?, reductions: comm(1)? };
            body(seat).map_err(FailureReason::Error)
        };
        let outcome = catch_unwind(AssertUnwindSafe(run));
        let outcome = outcome.unwrap_or_else(|panic| Err(FailureReason::Panic(message(&*panic))));
        outcome.inspect_err(|reason| {
            self.alarm.raise(CommError::PeerFailed { rank, reason: reason.to_string() });
        })
    }

    /// The failure to report of those here: that of the rank that failed first in the world, if it is here.
    fn first<T, E>(&self, outcomes: Vec<Result<T, FailureReason<E>>>) -> Result<Vec<T>, LaunchFailure<E>> {
        let (mut results, mut failures) = (Vec::new(), Vec::new());
        for (rank, outcome) in self.assembly.local().map(Rank).zip(outcomes) {
            match outcome {
                Ok(result) => results.push(result),
                Err(reason) => failures.push(LaunchFailure { rank, reason }),
            }
        }
        if failures.is_empty() {
            return Ok(results);
        }
        let culprit = match self.alarm.raised() {
            Some(CommError::PeerFailed { rank, .. }) => Some(rank),
            _ => None,
        };
        let at = failures.iter().position(|failure| Some(failure.rank) == culprit).unwrap_or(0);
        Err(failures.swap_remove(at))
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
        let (here, there) = (self.assembly.local(), self.assembly.world());
        let failed = |rank, reason| LaunchFailure { rank: Rank(rank), reason };
        if world != there {
            let error = OtherWorld { asked: world, there };
            return Err(failed(here.start, FailureReason::Setup(error.into())));
        }
        let number = self.launched.fetch_add(1, Ordering::Relaxed);
        let outcomes = thread::scope(|scope| {
            let spawn = |rank: usize| {
                let thread = thread::Builder::new().name(Rank(rank).to_string()).stack_size(STACK_BYTES);
                let spawned = thread.spawn_scoped(scope, move || self.rank(Rank(rank), number, body));
                spawned.map_err(|error| {
                    let reason = format!("its thread could not be started: {error}");
                    self.alarm.raise(CommError::PeerFailed { rank: Rank(rank), reason });
                    FailureReason::Spawn(error)
                })
            };
            let threads: Vec<_> = here.map(spawn).collect();
            let join = |thread: thread::ScopedJoinHandle<'_, _>| thread.join().expect("panics are caught");
            threads.into_iter().map(|thread| thread.and_then(join)).collect()
        });
        self.first(outcomes)
    }
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

/// The assembly of one of several worlds of the same processes: its topics are its own.
pub struct Scoped {
    all: Arc<dyn Assembly>,
    prefix: String,
}

impl Scoped {
    /// The topics of all that begin with this name.
    pub fn new(all: &Arc<dyn Assembly>, name: &str) -> Self {
        Self { all: Arc::clone(all), prefix: format!("{name}: ") }
    }

    fn topic(&self, topic: &str) -> String {
        format!("{}{topic}", self.prefix)
    }
}

impl Assembly for Scoped {
    fn world(&self) -> usize {
        self.all.world()
    }

    fn local(&self) -> Range<usize> {
        self.all.local()
    }

    fn give(&self, topic: &str, rank: Rank, value: Vec<u8>) -> Result<(), CommError> {
        self.all.give(&self.topic(topic), rank, value)
    }

    fn given(&self, topic: &str) -> usize {
        self.all.given(&self.topic(topic))
    }

    fn collect(&self, topic: &str, ranks: usize, limit: Duration) -> Result<Vec<Vec<u8>>, AssemblyError> {
        self.all.collect(&self.topic(topic), ranks, limit)
    }

    fn announce(&self, topic: &str, value: Vec<u8>) -> Result<(), CommError> {
        self.all.announce(&self.topic(topic), value)
    }

    fn hear(&self, topic: &str, limit: Duration) -> Result<Vec<u8>, AssemblyError> {
        self.all.hear(&self.topic(topic), limit)
    }

    fn fail(&self, rank: Rank, kind: FailureKind, cause: String) {
        self.all.fail(rank, kind, cause);
    }

    fn give_up(&self, topic: &str) {
        self.all.give_up(&self.topic(topic));
    }
}
