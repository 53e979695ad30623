//! Ranks that are threads of one process: their launcher, and the communicator between them.
//!
//! They share an address space, so a collective only moves elements from buffer to buffer. Where a cluster would hang,
//! a world of threads reports a failure: of the first rank that failed, or for which others wait in vain.

mod comm;
mod exchange;
mod rank_scheduler;

use std::fmt;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use fsdp_core::comm::{Comm, CommError, Fingerprint};
use fsdp_core::{Error, Memory, Rank};

use comm::ThreadComm;
use comm::World;

use crate::launch::{FailureReason, LaunchFailure, Launcher, MakeMemory, Seat};
use crate::ranks::{first_failure, run_ranks};
use crate::rendezvous::Group;

/// Options of ranks that run as threads.
#[derive(Clone, Debug)]
pub struct ThreadOptions {
    /// Maximum number of ranks that run at a time; ranks blocked in a collective do not count. At least 1.
    pub cores: usize,
    /// The world fails if ranks wait in a collective and no rank has entered or left one for this long. (It fails at
    /// once if no rank can make progress.)
    pub timeout: Duration,
    /// Whether the outputs of an all-gather share storage, if the memory supports it.
    pub share_unsharded: bool,
    /// Stack size of each rank's thread, in bytes.
    pub stack_bytes: usize,
    /// Changes the calls of ranks, to test failures; `None` changes nothing.
    pub intercept: Option<Arc<dyn Intercept>>,
}

impl Default for ThreadOptions {
    /// All cores of this machine, a timeout of ten minutes, no sharing, no intercept.
    fn default() -> Self {
        Self {
            cores: thread::available_parallelism().map_or(1, usize::from),
            timeout: Duration::from_secs(600),
            share_unsharded: false,
            stack_bytes: 2 << 20,
            intercept: None,
        }
    }
}

/// How a rank enters a collective.
#[derive(Debug)]
pub enum Entry {
    /// It makes this call instead.
    Call(Fingerprint),
    /// Its call fails.
    Fail(CommError),
    /// It never enters: it blocks until the world has failed.
    Stall,
}

/// Sees every call of every rank before it is made.
pub trait Intercept: fmt::Debug + Send + Sync {
    /// Decides what `rank` does instead of `call`.
    fn entry(&self, rank: Rank, call: Fingerprint) -> Entry;
}

/// Launches every rank as a thread of this process.
pub struct Threads<M> {
    options: ThreadOptions,
    memory: Box<MakeMemory<M>>,
}

impl<M: Memory> Threads<M> {
    /// Creates a launcher. `memory(rank, world)` creates the memory of each rank, on its thread; if it fails, so does
    /// the setup of that rank.
    pub fn new(
        options: ThreadOptions,
        memory: impl Fn(Rank, usize) -> Result<Arc<M>, Error> + Send + Sync + 'static,
    ) -> Self {
        Self { options, memory: Box::new(memory) }
    }
}

impl<M: Memory> Launcher for Threads<M> {
    type Memory = M;

    fn launch<T: Send, E: Send + fmt::Debug + fmt::Display>(
        &self,
        ranks: usize,
        body: &(dyn Fn(Seat<M>) -> Result<T, E> + Sync),
    ) -> Result<Vec<T>, LaunchFailure<E>> {
        let world = Arc::new(World::new(ranks, &self.options));
        let members: Arc<[Rank]> = (0..ranks).map(Rank).collect();
        let run = |rank| {
            world.cores.start(rank);
            let memory = (self.memory)(rank, ranks).map_err(|error| FailureReason::Setup(error.into()))?;
            let comm = |number, name| {
                let group = Group::root(number, name, &members);
                Comm::new(Box::new(ThreadComm::new(&world, group, rank)))
            };
            let seat = Seat { rank, memory, gathers: comm(0, "gathers"), reductions: comm(1, "reductions") };
            body(seat).map_err(FailureReason::Error)
        };
        let on_end = |rank, reason: Option<&_>| {
            world.cores.end(rank, reason.map(|reason| reason as &dyn fmt::Display))
        };
        let outcomes = run_ranks(0..ranks, self.options.stack_bytes, run, on_end);
        first_failure(0..ranks, outcomes, world.cores.failure())
    }
}
