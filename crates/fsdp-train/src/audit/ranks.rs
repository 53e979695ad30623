//! The ranks that judge a step together: each computes the gradient of some micro-batches. The sums over all are the same bits
//! on every rank, so all compare alike and decide alike.

use std::sync::Arc;

use fsdp_comm::launch::Seat;
use fsdp_core::comm::{Comm, Purpose, ReduceOp};
use fsdp_core::memory::{Category, HostSlice, HostSliceMut, Slice, SliceMut};
use fsdp_core::{DType, Memory, Queue};
use fsdp_nn::HostMemory;

use crate::error::TrainError;

/// This rank among those that judge the step.
pub(super) struct Ranks {
    memory: Arc<HostMemory>,
    comm: Comm<HostMemory>,
}

impl Ranks {
    pub(super) fn new(seat: Seat<HostMemory>) -> Self {
        Self { memory: seat.memory, comm: seat.reductions }
    }

    /// Whether this rank reports what is being done.
    pub(super) fn is_first(&self) -> bool {
        self.comm.rank() == 0
    }

    /// Those of a list that this rank computes.
    pub(super) fn own<T>(&self, all: impl Iterator<Item = T>) -> impl Iterator<Item = T> {
        dealt(all, self.comm.rank(), self.comm.size())
    }

    /// Replaces values by their sums over all ranks.
    ///
    /// # Errors
    /// Errors of communication, and of memory.
    pub(super) fn add_up(&mut self, values: &mut [f32]) -> Result<(), TrainError> {
        let memory = &*self.memory;
        let mut buffer = memory.allocate(Category::CommStaging, DType::F32, values.len())?;
        memory.write(Queue::Compute, HostSlice::F32(values), SliceMut::whole(&mut buffer))?;
        let pending = self.comm.all_reduce(memory, ReduceOp::Sum, Purpose::Gradient, None, vec![buffer])?;
        let done = pending.wait_on(memory, Queue::Compute)?;
        memory.read(Queue::Compute, Slice::whole(&done.outputs[0]), HostSliceMut::F32(values))?;
        Ok(())
    }
}

/// Those of a list that a rank of a world computes: they are dealt in turn.
pub(super) fn dealt<T>(all: impl Iterator<Item = T>, rank: usize, world: usize) -> impl Iterator<Item = T> {
    all.skip(rank).step_by(world)
}

#[cfg(test)]
impl Ranks {
    /// A rank without others.
    pub(super) fn alone() -> Self {
        use fsdp_comm::launch::Launcher;
        use fsdp_nn::HostOptions;
        use fsdp_sim::{ThreadOptions, Threads};
        let launcher = Threads::new(ThreadOptions::default(), |_, _| {
            Ok(Arc::new(HostMemory::new(HostOptions::default())?))
        });
        let mut ranks = launcher.launch(1, &|seat| Ok::<_, TrainError>(Ranks::new(seat))).unwrap();
        ranks.swap_remove(0)
    }
}

#[cfg(test)]
mod tests;
