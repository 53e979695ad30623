//! The launcher of a verification over several processes.

use std::fmt;
use std::sync::Arc;

use fsdp_comm::assembly::Assembly;
use fsdp_comm::launch::{LaunchFailure, Launcher, Seat};
use fsdp_comm::process::launch::Processes;
use fsdp_core::Memory;
use fsdp_sim::Threads;

/// Runs a world of one rank, which is the oracle's, in this process alone, and all others with the other processes. (One
/// rank is never spread over several processes.)
pub(crate) struct Together<M: Memory> {
    alone: Threads<M>,
    processes: Processes<M>,
}

impl<M: Memory> Together<M> {
    /// Of the ranks of this process, and the one that is here alone.
    pub(crate) fn new(alone: Threads<M>, processes: Processes<M>) -> Self {
        Self { alone, processes }
    }
}

impl<M: Memory> Launcher for Together<M> {
    type Memory = M;

    fn ranks_on_machine(&self, world: usize) -> usize {
        self.processes.ranks_on_machine(world)
    }

    fn assemble(&self, world: usize) -> Arc<dyn Assembly> {
        self.processes.assemble(world)
    }

    fn launch<T: Send, E: Send + fmt::Debug + fmt::Display>(
        &self,
        world: usize,
        body: &(dyn Fn(Seat<M>) -> Result<T, E> + Sync),
    ) -> Result<Vec<T>, LaunchFailure<E>> {
        if world == 1 { self.alone.launch(world, body) } else { self.processes.launch(world, body) }
    }
}
