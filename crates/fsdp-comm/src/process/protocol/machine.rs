//! What the state machines of all processes have in common: what they are told, and what they want done.

use std::ops::Range;
use std::time::Duration;

use fsdp_core::comm::CommError;

use crate::process::frame::Frame;
use crate::process::message::Refusal;
use crate::process::world::{Failure, Roster, Verdict};

/// How long after a verdict the remaining processes may go on giving and announcing.
pub(in crate::process) const GRACE: Duration = Duration::from_secs(3);

/// How long the leader of a successful world waits for processes that have not said goodbye.
pub(in crate::process) const LEAVE_MAX: Duration = Duration::from_secs(60);

/// Identifies a connection; ids are never reused within a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(in crate::process) struct ConnectionId(pub(in crate::process) usize);

/// A request of the ranks of this process.
#[derive(Debug)]
pub(in crate::process) enum Request {
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
pub(in crate::process) enum Output {
    /// Send a frame over some connections.
    Send(Vec<ConnectionId>, Frame),
    /// Close a connection, after what was sent.
    Close(ConnectionId),
    /// Notify this process.
    Event(Event),
}

/// A notification for this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::process) enum Event {
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
pub(in crate::process) trait Machine: Send {
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
