//! The traits that a communication backend implements.

use super::{CommError, Fingerprint};
use crate::error::Error;
use crate::failure::FailureKind;
use crate::memory::Memory;
use crate::rank::{Queue, Rank};

/// The buffers that a finished collective returns.
#[derive(Debug)]
pub struct Completed<B> {
    /// The results, one per segment.
    pub outputs: Vec<B>,
    /// The consumed inputs, released, of a collective that
    /// [gives them up](super::CollectiveKind::gives_up_inputs); empty for others.
    pub inputs: Vec<B>,
}

/// A backend's handle of a collective in flight.
///
/// On a device, the collective may fail long after [`InFlight::wait_on`] has returned on the host. Its results are
/// then wrong, and [`Communicator::check`] fails from that moment on.
pub trait InFlight<M: Memory>: Send {
    /// Whether [`InFlight::wait_on`] would return without blocking the host.
    fn is_ready(&mut self) -> bool;

    /// Makes later work of `queue` wait for the collective, and returns its buffers; host backends block.
    ///
    /// # Errors
    /// [`CommError`] when the collective failed on any rank.
    fn wait_on(self: Box<Self>, memory: &M, queue: Queue) -> Result<Completed<M::Buffer>, Error>;

    /// Aborts the communicator with this reason, because the caller will not wait for the collective.
    fn abandon(self: Box<Self>, reason: String);
}

/// A backend for one group of ranks. Calls arrive checked, in the order in which they were issued; the segments of
/// one call move together.
pub trait Communicator<M: Memory>: Send {
    /// This rank's index in the group.
    fn rank(&self) -> usize;

    /// Number of ranks in the group.
    fn size(&self) -> usize;

    /// This rank in the world, for error messages.
    fn world_rank(&self) -> Rank;

    /// Starts a collective. `call.kind` names it and defines how each `inputs[i]` and `outputs[i]` is used; in-place
    /// collectives have only outputs.
    ///
    /// The buffers are ready (inputs filled, outputs free) once earlier work of this rank's queue
    /// [`Fingerprint::queue`] is done; the results are ready for the queue given to
    /// [`InFlight::wait_on`]. Sums are added by the tree over ranks. (A library that adds in its own order may also
    /// round the product of an average and its sum in one step; its results then differ in the last bits from other
    /// backends.)
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

    /// Creates a group of the ranks that pass the same `color`, ordered by their current ranks; blocks.
    ///
    /// # Errors
    /// [`Error::Comm`].
    fn split(
        &mut self,
        memory: &M,
        call: Fingerprint,
        color: usize,
    ) -> Result<Box<dyn Communicator<M>>, Error>;

    /// Checks that all collectives whose results the host has read succeeded. The default suffices for a backend that
    /// reports every failure from [`InFlight::wait_on`].
    ///
    /// # Errors
    /// The failure that ended the world.
    fn check(&self) -> Result<(), CommError> {
        Ok(())
    }

    /// Makes every pending and future collective of the world fail with `reason` and `kind`.
    fn abort(&mut self, reason: &str, kind: FailureKind);
}
