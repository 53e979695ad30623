//! The contract of a transport: messages between pairs of ranks.
//!
//! Any transport that delivers bytes in order between two ranks (threads, sockets, MPI) becomes a communicator through
//! this trait; see [`LinkComm`](crate::LinkComm).

use std::sync::Arc;

use fsdp_core::Rank;
use fsdp_core::comm::CommError;

/// Bytes in front of every message; they identify the call that it belongs to (`session.rs`).
pub type Header = [u8; 31];

/// One rank's ends of the connections to all other ranks of a group.
///
/// Messages between two ranks arrive once, whole and in order. After a link is closed (dropped), a peer that still
/// expects a message from it gets an error.
pub trait Link: Send {
    /// This rank's index in the group.
    fn rank(&self) -> usize;

    /// The ranks of the group, by index.
    fn members(&self) -> &[Rank];

    /// Sends a message, receives one, or does both at the same time: if two ranks call this with each other, neither
    /// waits for the other to receive first. Bytes move directly from and into the caller's slices.
    ///
    /// A message whose header or length differs from the expected one is not received; afterwards nothing can be
    /// exchanged with its sender.
    ///
    /// # Errors
    /// [`CommError`] if an alarm was raised, a peer has closed its link, or the transport failed.
    fn exchange(
        &mut self,
        outgoing: Option<Outgoing<'_>>,
        incoming: Option<Incoming<'_, '_>>,
    ) -> Result<Exchanged, CommError>;

    /// The lowest channel number such that this rank has used neither it nor a higher one; see [`Link::subgroup`].
    fn unused_channel(&self) -> u64;

    /// Creates connections among some members, independent of the present ones. All of these members must pass the same
    /// `members`, which include this rank, and the same `channel`, not below the [`Link::unused_channel`] of any of
    /// them.
    fn subgroup(&self, members: Arc<[Rank]>, channel: u64) -> Box<dyn Link>;

    /// The alarm of the world that this link belongs to.
    fn alarm(&self) -> Arc<dyn Alarm>;
}

/// A message to send.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    /// Index of the receiver.
    pub to: usize,
    /// The call that it belongs to.
    pub header: &'a Header,
    /// The data: the concatenation of these parts.
    pub parts: &'a [&'a [u8]],
}

/// An expected message.
#[derive(Debug)]
pub struct Incoming<'a, 'p> {
    /// Index of the sender.
    pub from: usize,
    /// The header that it must have.
    pub header: &'a Header,
    /// Where the data goes, one part after the other; their total length is the expected length.
    pub parts: &'a mut [&'p mut [u8]],
}

impl Outgoing<'_> {
    /// Total length of the parts, in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.len() as u64).sum()
    }
}

impl Incoming<'_, '_> {
    /// Total length of the parts, in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.len() as u64).sum()
    }
}

/// Returns the index of a rank among the members of its group.
///
/// # Panics
/// Panics if the rank is not a member.
pub fn place(rank: Rank, members: &[Rank]) -> usize {
    members.iter().position(|&member| member == rank).expect("a rank is a member of its own groups")
}

/// Copies `bytes` into `parts`, one after the other; `bytes` must be at least as long as all parts together.
pub fn scatter(mut bytes: &[u8], parts: &mut [&mut [u8]]) {
    for part in parts {
        part.copy_from_slice(bytes.split_off(..part.len()).expect("there are bytes for all parts"));
    }
}

/// How an exchange ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exchanged {
    /// Everything has been sent and received.
    Done,
    /// A message with another header or length arrived; it was not received.
    Differs {
        /// Its header.
        header: Header,
        /// Its length without the header.
        len_bytes: u64,
    },
    /// The link's time limit passed while waiting for a member.
    Late {
        /// Index of that member.
        peer: usize,
    },
}

/// Ends a world: spreads its first failure to all ranks.
pub trait Alarm: Send + Sync {
    /// Makes every pending and future operation of every rank fail with `error`; only the first call counts.
    fn raise(&self, error: CommError);

    /// The error that was raised first; `None` if none was.
    fn raised(&self) -> Option<CommError>;
}
