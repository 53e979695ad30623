//! What a backend implements.

use super::{CommError, Fingerprint};
use crate::error::Error;
use crate::failure::FailureKind;
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

    /// Aborts the communicator, with this reason, because the caller will not wait.
    fn abandon(self: Box<Self>, reason: String);
}

/// What a backend implements for one group of ranks. Calls arrive checked, in the order in which they were
/// issued; segments of one call move together.
pub trait Communicator<M: Memory>: Send {
    /// This rank's place in the group.
    fn rank(&self) -> usize;

    /// Number of ranks in the group.
    fn size(&self) -> usize;

    /// This rank's place in the world, for messages.
    fn world_rank(&self) -> Rank;

    /// Starts a collective; `call.kind` says which one, and what becomes of each `inputs[i]` and `outputs[i]`. What works
    /// in place has outputs only.
    ///
    /// Its buffers are ready (inputs filled, outputs free) behind the earlier work of the queue
    /// [`CollectiveKind::queue`](super::CollectiveKind::queue) of this rank; the results are ready for the queue given to
    /// [`InFlight::wait_on`]. Sums are added by the tree over ranks. (A library that adds in an order of its own may
    /// also round the product of an average and its sum together; it does not have the bits of the others.)
    ///
    /// # Errors
    /// [`Error::Comm`].
    fn start(
        &mut self,
        memory: &M,
        call: Fingerprint,
        inputs: Vec<M::Buffer>,
        outputs: Vec<M::Buffer>,
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

    /// Makes every pending and future collective of the world fail with `reason`, and with what that calls for.
    fn abort(&mut self, reason: &str, kind: FailureKind);
}
