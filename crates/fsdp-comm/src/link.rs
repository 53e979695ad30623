//! The contract of a transport: messages between pairs of ranks.
//!
//! Whatever can carry bytes in order between two ranks (threads, sockets, MPI) becomes a communicator through this
//! trait; see [`LinkComm`](crate::LinkComm).

use std::sync::Arc;

use fsdp_core::Rank;
use fsdp_core::comm::CommError;

/// Bytes in front of every message, which say what it belongs to (`session.rs`).
pub type Header = [u8; 31];

/// One rank's ends of the connections to all other ranks of a group.
///
/// Messages between two ranks arrive once, whole and in order. Closing (dropping) a link is an error for
/// whoever then still expects a message.
pub trait Link: Send {
    /// This rank's place in the group.
    fn rank(&self) -> usize;

    /// The ranks of the group, by their places.
    fn members(&self) -> &[Rank];

    /// Sends a message, receives one, or does both at the same time: two ranks may call this with each other, and
    /// neither waits for the other to receive first. Bytes go out of and into the caller's slices.
    ///
    /// A message that has another header or length than expected is not received: nothing can be exchanged with its
    /// sender after that.
    ///
    /// # Errors
    /// [`CommError`] when an alarm was raised, a peer has closed its link, or the transport failed.
    fn exchange(
        &mut self,
        outgoing: Option<Outgoing<'_>>,
        incoming: Option<Incoming<'_, '_>>,
    ) -> Result<Exchanged, CommError>;

    /// A number of a channel that this rank has not used; see [`Link::subgroup`].
    fn unused_channel(&self) -> u64;

    /// New connections among some members, independent of the present ones. All of them give the same `members`, this rank
    /// among them, and the same `channel`: at least the [`Link::unused_channel`] of each.
    fn subgroup(&self, members: Arc<[Rank]>, channel: u64) -> Box<dyn Link>;

    /// The alarm of the world that this link belongs to.
    fn alarm(&self) -> Arc<dyn Alarm>;
}

/// A message to send.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    /// To which member.
    pub to: usize,
    /// What it belongs to.
    pub header: &'a Header,
    /// Its bytes, one part after the other.
    pub parts: &'a [&'a [u8]],
}

/// A message that is expected.
#[derive(Debug)]
pub struct Incoming<'a, 'p> {
    /// From which member.
    pub from: usize,
    /// What it must belong to.
    pub header: &'a Header,
    /// Where its bytes go, one part after the other; their lengths are what is expected.
    pub parts: &'a mut [&'p mut [u8]],
}

impl Outgoing<'_> {
    /// Bytes of all parts.
    pub fn len_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.len() as u64).sum()
    }
}

impl Incoming<'_, '_> {
    /// Bytes of all parts.
    pub fn len_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.len() as u64).sum()
    }
}

/// The place of a rank among the members of its group.
///
/// # Panics
/// When it is not one.
pub fn place(rank: Rank, members: &[Rank]) -> usize {
    members.iter().position(|&member| member == rank).expect("a rank is a member of its own groups")
}

/// Puts bytes, one part after the other, where they belong; those of all parts.
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
    /// A message came that was not expected; it was not received.
    Differs {
        /// Its header.
        header: Header,
        /// Its length without the header.
        len_bytes: u64,
    },
    /// The time limit of the link has passed without this member.
    Late {
        /// Who was waited for.
        peer: usize,
    },
}

/// What ends a world: the first failure, known to all ranks.
pub trait Alarm: Send + Sync {
    /// Makes every pending and future operation of every rank fail with `error`; only the first call counts.
    fn raise(&self, error: CommError);

    /// The error that was raised first.
    fn raised(&self) -> Option<CommError>;
}
