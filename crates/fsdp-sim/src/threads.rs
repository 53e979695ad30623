//! Ranks that are threads of one process: their launcher, and the communicator between them.
//!
//! They share an address space, so a collective only moves elements from buffer to buffer. Where a cluster would hang,
//! a world of threads reports a failure: of the first rank that failed, or for which others wait in vain.

mod comm;
mod exchange;
mod options;
mod rank_scheduler;

use std::fmt;
use std::sync::Arc;

use fsdp_comm::launch::{FailureReason, LaunchFailure, Launcher, MakeMemory, Seat};
use fsdp_comm::ranks::{first_failure, run_ranks};
use fsdp_comm::rendezvous::Group;
use fsdp_core::comm::Comm;
use fsdp_core::{Error, Memory, Rank};

pub use options::ThreadOptions;

use comm::{ThreadComm, World};

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
