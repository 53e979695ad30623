//! The control plane as state machines, without sockets, clocks or threads. The rules are in the documentation of
//! [`process`](super).

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

/// How long after a verdict the remaining processes may go on giving and announcing.
pub(super) const GRACE: Duration = Duration::from_secs(3);

/// How long the leader of a successful world waits for processes that have not said goodbye.
pub(super) const LEAVE_MAX: Duration = Duration::from_secs(60);

/// Identifies a connection; ids are never reused within a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ConnectionId(pub(super) usize);

/// A request of the ranks of this process.
#[derive(Debug)]
pub(super) enum Request {
    /// Give a value. Not used on the leader, which stores its values itself.
    Give { topic: String, rank: usize, value: Vec<u8> },
    /// Announce a value to all processes.
    Announce { topic: String, value: Vec<u8> },
    /// Report the collective that was begun last: a member to the leader, the leader to all.
    Calling { call: String },
    /// Report a failure of this process.
    Fail(Failure),
    /// Leave: this process is done.
    Leave,
}

/// An action for the driver.
#[derive(Debug)]
pub(super) enum Output {
    /// Send a frame over some connections.
    Send(Vec<ConnectionId>, Frame),
    /// Close a connection, after what was sent.
    Close(ConnectionId),
    /// Notify this process.
    Event(Event),
}

/// A notification for this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// The leader refuses this process.
    Refused(Refusal),
    /// The connection was lost before the world began; the process should join again.
    Dropped { reason: String },
    /// The world begins.
    Go(Roster),
    /// A rank has given a value.
    Gave { topic: String, rank: usize, value: Vec<u8> },
    /// Another process has announced a value.
    Announced { topic: String, value: Vec<u8> },
    /// The world has failed.
    Verdict(Verdict),
    /// Some ranks will give and announce nothing more.
    Lost { ranks: Range<usize>, error: CommError },
    /// This process has left the world.
    Left,
}

/// The state machine of one process of a world.
pub(super) trait Machine: Send {
    /// An authenticated connection was established.
    fn opened(&mut self, connection: ConnectionId);

    /// A frame has arrived.
    fn received(&mut self, connection: ConnectionId, frame: Frame);

    /// A connection has ended other than by [`Output::Close`].
    fn closed(&mut self, connection: ConnectionId, reason: &str);

    /// Advances the time to `passed` since this machine was created. To be called often, and after receiving everything
    /// that has arrived: otherwise a process that was stopped would blame others whose messages it has not read.
    fn tick(&mut self, passed: Duration);

    /// Handles a request of this process.
    fn request(&mut self, request: Request);

    /// Returns the actions since the last call.
    fn take(&mut self) -> Vec<Output>;
}

#[cfg(test)]
mod tests;
