//! Where the calls of the ranks of a process meet: who has entered which collective, who is late, and what failed first.
//!
//! Plain data, which knows no memory, link or library. Each communicator between threads keeps a [`Rendezvous`] behind its
//! lock (that between threads, and that over NCCL), so that all of them compare calls, find who is to blame
//! and end a world in the same way. A process among others [reports](Table::report) its calls, and the leader
//! [judges](judge()) the reports of all.
//!
//! How processes find each other is another rendezvous, `process/rendezvous.rs`.

mod group;
mod judge;
mod line;
mod report;
mod table;
mod waits;

use std::ops::Range;
use std::time::{Duration, Instant};

use fsdp_core::comm::{CommError, Fingerprint};
use fsdp_core::{Rank, RunClock};

pub use group::Group;
pub use judge::{Ruling, judge};
pub use line::Position;
pub use report::Report;
pub use table::{Seat, Table};
pub(crate) use waits::{Wait, overdue, stuck};

/// The rank to blame, and what every call returns from now on.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The rank to blame.
    pub culprit: Rank,
    /// What every call of every rank returns from now on.
    pub error: CommError,
}

impl Failure {
    /// `rank` reported or met `reason`.
    pub fn of_rank(rank: Rank, reason: String) -> Self {
        Self { culprit: rank, error: CommError::PeerFailed { rank, reason } }
    }
}

/// The calls of the ranks of a process, the first failure, and the time as far as this process ran. `E` is what tells when
/// a call that was issued has ended.
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
    /// The ranks `here`, of which none waits for longer than `limit`.
    pub fn new(here: Range<usize>, limit: Duration) -> Self {
        let (table, clock) = (Table::new(here), RunClock::new(limit));
        Self { table, failure: None, limit, start: Instant::now(), clock }
    }

    /// The time as far as this process ran.
    pub fn now(&mut self) -> Instant {
        self.start + self.clock.at(self.start.elapsed())
    }

    /// How long whoever waits may sleep between two looks.
    pub fn interval(&self) -> Duration {
        self.clock.interval()
    }

    /// How long a rank may wait.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// The place of `rank` in a group; see [`Table::seat`].
    pub fn seat(&mut self, group: &Group, rank: Rank, shares: Option<Seat>) -> Seat {
        let now = self.now();
        self.table.seat(group, rank, shares, now)
    }

    /// Enters a rank into its next call.
    ///
    /// # Errors
    /// The failure of the world, or that this call differs from another rank's.
    pub fn enter(&mut self, seat: Seat, call: Fingerprint) -> Result<Position, Failure> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        let now = self.now();
        self.table.enter(seat, call, now).map_err(|error| Failure { culprit: self.table.rank(seat), error })
    }

    /// Notes that a call has ended on a rank.
    pub fn end_call(&mut self, seat: Seat, position: Position) {
        let now = self.now();
        self.table.end_call(seat, position, now);
    }

    /// The first failure, if there is one.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// # Errors
    /// The first failure, as every call returns it.
    pub fn check(&self) -> Result<(), CommError> {
        self.failure.as_ref().map_or(Ok(()), |failure| Err(failure.error.clone()))
    }

    /// Notes a failure; whether it is the first.
    pub fn fail(&mut self, failure: Failure) -> bool {
        if self.failure.is_some() {
            return false;
        }
        tracing::debug!(culprit = failure.culprit.0, error = %failure.error, "the world failed");
        self.failure = Some(failure);
        true
    }
}
