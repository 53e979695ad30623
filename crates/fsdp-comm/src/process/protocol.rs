//! The control plane without sockets, clocks and threads: what a process says, and what it concludes from what it
//! hears. The rules are in the documentation of [`process`](super).

mod leader;
mod member;
mod pulse;

use std::ops::Range;
use std::time::Duration;

use fsdp_core::comm::CommError;

use super::frame::Frame;
use super::message::Refusal;
use super::world::{Failure, Roster, Verdict};

pub(super) use leader::Leader;
pub(super) use member::Member;
pub(super) use pulse::Pulse;

/// How long after a verdict the rest of a world may go on giving and announcing.
pub(super) const GRACE: Duration = Duration::from_secs(3);

/// How long the leader waits, when all is well, for processes that have not said goodbye.
pub(super) const LEAVE_MAX: Duration = Duration::from_secs(60);

/// A connection, by a number that is used once in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ConnectionId(pub(super) usize);

/// What the ranks of this process ask for.
#[derive(Debug)]
pub(super) enum Request {
    /// Give a value. Not of the leader, which has the board.
    Give { topic: String, rank: usize, value: Vec<u8> },
    /// Announce a value to all processes.
    Announce { topic: String, value: Vec<u8> },
    /// Say which collective was begun last: to the leader, and the leader to all.
    Calling { call: String },
    /// Something failed here.
    Fail(Failure),
    /// All is done here.
    Leave,
}

/// What is to be done.
#[derive(Debug)]
pub(super) enum Output {
    /// Send a frame over some connections.
    Send(Vec<ConnectionId>, Frame),
    /// Close a connection behind what was sent.
    Close(ConnectionId),
    /// Tell this process.
    Event(Event),
}

/// What this process is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// The leader does not let this process join.
    Refused(Refusal),
    /// The connection was lost before the world began: join again.
    Dropped { reason: String },
    /// The world begins.
    Go(Roster),
    /// A rank has given.
    Gave { topic: String, rank: usize, value: Vec<u8> },
    /// Another process has announced.
    Announced { topic: String, value: Vec<u8> },
    /// The world has failed.
    Verdict(Verdict),
    /// Nothing more comes from some ranks.
    Lost { ranks: Range<usize>, error: CommError },
    /// This process has no further part in the world.
    Left,
}

/// One process of a world.
pub(super) trait Machine: Send {
    /// A connection is there, and its ends believe each other.
    fn opened(&mut self, connection: ConnectionId);

    /// A frame has come.
    fn received(&mut self, connection: ConnectionId, frame: Frame);

    /// A connection has ended, and not by [`Output::Close`].
    fn closed(&mut self, connection: ConnectionId, reason: &str);

    /// `passed` has passed since this machine was made. Called often, and after what has come until then was received: a
    /// process that was stopped would otherwise blame those whose messages it has not read.
    fn tick(&mut self, passed: Duration);

    /// This process asks for something.
    fn request(&mut self, request: Request);

    /// What is to be done since the last call.
    fn take(&mut self) -> Vec<Output>;
}

#[cfg(test)]
mod tests;
