//! The contract of a transport: messages between pairs of ranks.
//!
//! Whatever can carry bytes in order between two ranks (threads, sockets, shared memory) becomes a
//! communicator through this trait; see [`LinkComm`](crate::LinkComm).

use std::sync::Arc;

use fsdp_core::Rank;
use fsdp_core::comm::CommError;

/// One rank's ends of the connections to all other ranks of a group.
///
/// Messages between two ranks arrive once, whole and in order. Closing (dropping) a link is an error for
/// whoever then still expects a message.
pub trait Link: Send {
    /// This rank's place in the group.
    fn rank(&self) -> usize;

    /// The ranks of the group, by their places.
    fn members(&self) -> &[Rank];

    /// Sends a message. It must not wait for the receiver to ask for it: two ranks may send to each other
    /// first and receive then.
    ///
    /// # Errors
    /// [`CommError`] when an alarm was raised or the transport failed.
    fn send(&mut self, to: usize, message: Vec<u8>) -> Result<(), CommError>;

    /// Waits for the next message; `None` when none came within the time limit of the link.
    ///
    /// # Errors
    /// [`CommError`] when an alarm was raised, the sender has closed its link, or the transport failed.
    fn recv(&mut self, from: usize) -> Result<Option<Vec<u8>>, CommError>;

    /// New connections among some members, independent of the present ones. All of them give the same `members`
    /// (present places, this rank among them) and the same `channel`, which is not used twice.
    fn subgroup(&self, members: &[usize], channel: [u64; 2]) -> Box<dyn Link>;

    /// The alarm of the world that this link belongs to.
    fn alarm(&self) -> Arc<dyn Alarm>;
}

/// What ends a world: the first failure, known to all ranks.
pub trait Alarm: Send + Sync {
    /// Makes every pending and future operation of every rank fail with `error`; only the first call counts.
    fn raise(&self, error: CommError);

    /// The error that was raised first.
    fn raised(&self) -> Option<CommError>;
}
