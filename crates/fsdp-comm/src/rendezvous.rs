//! Where the calls of the ranks of a process meet: which rank has entered which collective, which is late, and what
//! failed first.
//!
//! Plain data, independent of memories, links and libraries. Every communicator between threads (the one in memory, the
//! one over NCCL) keeps a [`Rendezvous`] under its lock, so that all of them compare calls, find the culprit and end a
//! world in the same way. In a world of several processes, each process [reports](Table::report) its calls, and the
//! leader [judges](judge()) all reports.
//!
//! The rendezvous of processes at startup is another one: `process/rendezvous.rs`.

mod call_sequence;
mod group;
mod judge;
mod report;
mod table;
mod waits;

use std::ops::Range;
use std::time::{Duration, Instant};

use fsdp_core::comm::{CommError, Fingerprint};
use fsdp_core::{Rank, RunClock};

pub use call_sequence::Position;
pub use group::Group;
pub use judge::{Ruling, judge};
pub use report::Report;
pub use table::{Seat, Table};
pub use waits::{Wait, overdue, stuck};

/// A failure of the world.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The rank to blame.
    pub culprit: Rank,
    /// The error that every call of every rank returns from now on.
    pub error: CommError,
}

impl Failure {
    /// A failure that `rank` reported or met.
    pub fn of_rank(rank: Rank, reason: String) -> Self {
        Self { culprit: rank, error: CommError::PeerFailed { rank, reason } }
    }
}

/// The calls of the ranks of a process, the first failure, and the running time of the process. `E` is an event that
/// tells when an issued call has ended.
#[derive(Debug)]
pub struct Rendezvous<E> {
    /// The calls.
    pub table: Table<E>,
    failure: Option<Failure>,
    limit: Duration,
    start: Instant,
    clock: RunClock,
}

impl<E> Rendezvous<E> {
    /// Creates the rendezvous of the ranks `local`, none of which may wait for longer than `limit`.
    pub fn new(local: Range<usize>, limit: Duration) -> Self {
        let (table, clock) = (Table::new(local), RunClock::new(limit));
        Self { table, failure: None, limit, start: Instant::now(), clock }
    }

    /// The current time, excluding periods in which the process was stopped.
    pub fn now(&mut self) -> Instant {
        self.start + self.clock.at(self.start.elapsed())
    }

    /// How long a waiting thread may sleep between two checks.
    pub fn interval(&self) -> Duration {
        self.clock.interval()
    }

    /// How long a rank may wait.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// The seat of `rank` in a group; see [`Table::seat`].
    pub fn seat(&mut self, group: &Group, rank: Rank, shares: Option<Seat>) -> Seat {
        let now = self.now();
        self.table.seat(group, rank, shares, now)
    }

    /// Enters a rank into its next call.
    ///
    /// # Errors
    /// The failure of the world, or the difference between this call and another rank's.
    pub fn enter(&mut self, seat: Seat, call: Fingerprint) -> Result<Position, Failure> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        let now = self.now();
        self.table.enter(seat, call, now).map_err(|error| Failure { culprit: self.table.rank(seat), error })
    }

    /// Records that a call has ended on a rank.
    pub fn end_call(&mut self, seat: Seat, position: Position) {
        let now = self.now();
        self.table.end_call(seat, position, now);
    }

    /// The first failure; `None` if there is none.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// Fails if the world has failed.
    ///
    /// # Errors
    /// The first failure, as every call returns it.
    pub fn check(&self) -> Result<(), CommError> {
        self.failure.as_ref().map_or(Ok(()), |failure| Err(failure.error.clone()))
    }

    /// Records a failure; returns whether it is the first.
    pub fn fail(&mut self, failure: Failure) -> bool {
        if self.failure.is_some() {
            return false;
        }
        tracing::debug!(culprit = failure.culprit.0, error = %failure.error, "the world failed");
        self.failure = Some(failure);
        true
    }
}
