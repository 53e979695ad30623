//! What a backend implements.

use super::{CommError, Fingerprint};
use crate::error::Error;
use crate::memory::Memory;
use crate::rank::{Queue, Rank};

/// What a finished collective gives back.
#[derive(Debug)]
pub struct Completed<B> {
    /// The results, one per segment.
    pub outputs: Vec<B>,
    /// The consumed inputs of a reduce-scatter, released; empty otherwise.
    pub inputs: Vec<B>,
}

/// A collective in flight, as a backend sees it.
///
/// On a device, the host may be long past [`InFlight::wait_on`] when the collective fails: then what it wrote is
/// wrong, and [`Communicator::check`] says so from that moment on.
pub trait InFlight<M: Memory>: Send {
    /// Whether [`InFlight::wait_on`] would return without blocking the host.
    fn is_ready(&mut self) -> bool;

    /// Orders `queue` behind the collective and returns its buffers; host backends block.
    ///
    /// # Errors
    /// [`CommError`] when the collective failed on any rank.
    fn wait_on(self: Box<Self>, memory: &M, queue: Queue) -> Result<Completed<M::Buffer>, Error>;

    /// Aborts the communicator because the caller will not wait.
    fn abandon(self: Box<Self>);
}

/// What a backend implements for one group of ranks. Calls arrive checked, in the order in which they were
/// issued; segments of one call move together.
///
/// Work is ordered by queues: an all-gather finds its buffers (inputs filled, outputs free) behind the earlier
/// work of [`Queue::Gather`] of its rank, a reduction or a broadcast behind that of [`Queue::Reduce`]; the results are
/// ready for the queue given to [`InFlight::wait_on`].
pub trait Communicator<M: Memory>: Send {
    /// This rank's place in the group.
    fn rank(&self) -> usize;

    /// Number of ranks in the group.
    fn size(&self) -> usize;

    /// This rank's place in the world, for messages.
    fn world_rank(&self) -> Rank;

    /// Starts an all-gather: `outputs[i]` becomes the concatenation of every rank's `inputs[i]`.
    ///
    /// # Errors
    /// [`Error::Comm`].
    fn all_gather(
        &mut self,
        memory: &M,
        call: Fingerprint,
        inputs: Vec<M::Buffer>,
        outputs: Vec<M::Buffer>,
    ) -> Result<Box<dyn InFlight<M>>, Error>;

    /// Starts a reduce-scatter: `outputs[i]` becomes this rank's part of the sum of every rank's `inputs[i]`,
    /// added by the tree over ranks. The inputs are consumed. The operation is in `call.kind`: for an average, every
    /// rank's elements are first multiplied by [`ReduceOp::factor`](super::ReduceOp::factor), rounded to their dtype,
    /// and each product is rounded. (A library that adds in an order of its own may round the first product and sum
    /// together; then it does not have the bits of the others.)
    ///
    /// # Errors
    /// [`Error::Comm`].
    fn reduce_scatter(
        &mut self,
        memory: &M,
        call: Fingerprint,
        inputs: Vec<M::Buffer>,
        outputs: Vec<M::Buffer>,
    ) -> Result<Box<dyn InFlight<M>>, Error>;

    /// Starts an all-reduce in place, added by the tree over ranks, with the operation in `call.kind` as
    /// [`Communicator::reduce_scatter`].
    ///
    /// # Errors
    /// [`Error::Comm`].
    fn all_reduce(
        &mut self,
        memory: &M,
        call: Fingerprint,
        buffers: Vec<M::Buffer>,
    ) -> Result<Box<dyn InFlight<M>>, Error>;

    /// Starts a broadcast in place: every rank's buffers become those of the rank at the place `root` of the group,
    /// which `call.kind` has too.
    ///
    /// # Errors
    /// [`Error::Comm`].
    fn broadcast(
        &mut self,
        memory: &M,
        call: Fingerprint,
        root: usize,
        buffers: Vec<M::Buffer>,
    ) -> Result<Box<dyn InFlight<M>>, Error>;

    /// A new group of the ranks that give the same `color`, in the order of their present ranks; blocks.
    ///
    /// # Errors
    /// [`Error::Comm`].
    fn split(
        &mut self,
        memory: &M,
        call: Fingerprint,
        color: usize,
    ) -> Result<Box<dyn Communicator<M>>, Error>;

    /// Whether all collectives whose results the host has seen were good. A backend whose failures all come out of
    /// [`InFlight::wait_on`] needs no more than this.
    ///
    /// # Errors
    /// The failure that ended the world.
    fn check(&self) -> Result<(), CommError> {
        Ok(())
    }

    /// Makes every pending and future collective of the world fail with `reason`.
    fn abort(&mut self, reason: &str);
}
