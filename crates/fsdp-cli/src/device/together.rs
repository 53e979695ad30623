//! The launcher of ranks in several processes.

use std::fmt;
use std::sync::Arc;

use fsdp_comm::assembly::Assembly;
use fsdp_comm::launch::{LaunchFailure, Launcher, Seat};
use fsdp_comm::process::launch::Processes;
use fsdp_sim::Threads;

/// Runs a world of one rank, the oracle's, in this process alone, and all other worlds together with the other
/// processes. (A single rank is never spread over processes.)
pub(crate) struct Together<A, P> {
    alone: A,
    processes: P,
}

/// The launcher for ranks on the host.
pub(crate) type OnHost<M> = Together<Threads<M>, Processes<M>>;

impl<A: Launcher, P: Launcher<Memory = A::Memory>> Together<A, P> {
    /// Combines the launcher of a single rank here with that of the ranks of all processes.
    pub(crate) fn new(alone: A, processes: P) -> Self {
        Self { alone, processes }
    }
}

impl<A: Launcher, P: Launcher<Memory = A::Memory>> Launcher for Together<A, P> {
    type Memory = A::Memory;

    fn ranks_on_machine(&self, world: usize) -> usize {
        self.processes.ranks_on_machine(world)
    }

    fn assemble(&self, world: usize) -> Arc<dyn Assembly> {
        self.processes.assemble(world)
    }

    fn launch<T: Send, E: Send + fmt::Debug + fmt::Display>(
        &self,
        world: usize,
        body: &(dyn Fn(Seat<A::Memory>) -> Result<T, E> + Sync),
    ) -> Result<Vec<T>, LaunchFailure<E>> {
        if world == 1 { self.alone.launch(world, body) } else { self.processes.launch(world, body) }
    }
}
