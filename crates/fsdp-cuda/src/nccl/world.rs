//! What the ranks of a process share: the table of their calls, the first failure, and all their communicators.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fsdp_core::comm::{CommError, Fingerprint};
use fsdp_core::{Error, Rank, RunClock};

use super::NcclError;
use super::link::Link;
use super::table::{Failure, Position, Seat, Table};
use crate::device::DeviceMemory;

pub(super) struct State<M: DeviceMemory> {
    pub(super) table: Table<M::Event>,
    pub(super) failure: Option<Failure>,
    start: Instant,
    clock: RunClock,
    /// The memories of ranks that have one, to ask them about events.
    pub(super) memories: Vec<Option<Arc<M>>>,
    pub(super) links: Vec<Arc<Link>>,
    /// How many ranks are connected with all others.
    seated: usize,
    /// All ranks have returned: the watcher closes what is left and ends.
    pub(super) stopping: bool,
}

impl<M: DeviceMemory> State<M> {
    /// The time as far as this process ran.
    pub(super) fn now(&mut self) -> Instant {
        self.start + self.clock.at(self.start.elapsed())
    }
}

/// Shared by all ranks, and the watcher.
pub(super) struct World<M: DeviceMemory> {
    state: Mutex<State<M>>,
    has_failed: AtomicBool,
    /// Wakes the watcher, and whoever waits for notes.
    changed: Condvar,
    pub(super) limit: Duration,
}

impl<M: DeviceMemory> World<M> {
    pub(super) fn new(ranks: usize, limit: Duration) -> Self {
        let state = State {
            table: Table::new(ranks),
            failure: None,
            start: Instant::now(),
            clock: RunClock::new(limit),
            memories: vec![None; ranks],
            links: Vec::new(),
            seated: 0,
            stopping: false,
        };
        Self { state: Mutex::new(state), has_failed: AtomicBool::new(false), changed: Condvar::new(), limit }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State<M>> {
        // Every change under the lock is complete before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the memory of a rank known.
    pub(super) fn add_memory(&self, rank: Rank, memory: Arc<M>) {
        self.lock().memories[rank.0] = Some(memory);
    }

    /// The seat of `rank` in the group at `path`, which shares the NCCL communicator of another group or has its own.
    pub(super) fn seat(
        &self,
        path: &[u64],
        name: &str,
        members: &Arc<[Rank]>,
        rank: Rank,
        shares: Option<Seat>,
    ) -> Seat {
        let mut state = self.lock();
        let now = state.now();
        state.table.seat(path, name, members, rank, shares, now)
    }

    /// Makes a communicator known to the watcher, which aborts it at once if the world has failed.
    pub(super) fn add_link(&self, link: Arc<Link>) {
        self.lock().links.push(link);
        self.changed.notify_all();
    }

    /// Enters a rank into its next call; a call that differs from another rank's ends the world.
    pub(super) fn enter(
        &self,
        seat: Seat,
        call: Fingerprint,
        note: Option<usize>,
    ) -> Result<Position, CommError> {
        let mut state = self.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.error.clone());
        }
        let culprit = state.table.members(seat)[seat.index];
        let now = state.now();
        match state.table.enter(seat, call, note, now) {
            Ok(position) => {
                if note.is_some() {
                    self.changed.notify_all();
                }
                Ok(position)
            }
            Err(error) => {
                self.fail_locked(&mut state, Failure { culprit, error: error.clone() });
                Err(error)
            }
        }
    }

    /// Waits until all ranks have entered a call with notes; the notes.
    pub(super) fn notes(&self, seat: Seat, position: Position) -> Result<Vec<usize>, CommError> {
        let mut state = self.lock();
        loop {
            if let Some(failure) = &state.failure {
                return Err(failure.error.clone());
            }
            if let Some(notes) = state.table.notes(seat, position) {
                return Ok(notes);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until all ranks are connected: one that fails afterwards fails in the middle of its work, and leaves no
    /// other without its seat.
    pub(super) fn meet_seated(&self) -> Result<(), CommError> {
        let mut state = self.lock();
        state.seated += 1;
        self.changed.notify_all();
        while state.seated < state.memories.len() {
            if let Some(failure) = &state.failure {
                return Err(failure.error.clone());
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }

    /// Notes that a call is with the device, and ends at `event`.
    pub(super) fn issued(&self, seat: Seat, position: Position, event: M::Event) {
        self.lock().table.issued(seat, position, event);
    }

    /// Notes that a call that the device has no part in has ended.
    pub(super) fn end_call(&self, seat: Seat, position: Position) {
        let mut state = self.lock();
        let now = state.now();
        state.table.end_call(seat, position, now);
    }

    /// Notes that a rank has returned, and why it failed if it did.
    pub(super) fn end_rank(&self, rank: Rank, failed: Option<String>) {
        let mut state = self.lock();
        state.table.end_rank(rank);
        if let Some(reason) = failed {
            let error = CommError::PeerFailed { rank, reason };
            self.fail_locked(&mut state, Failure { culprit: rank, error });
        }
    }

    /// Tells the watcher that all ranks have returned.
    pub(super) fn stop(&self) {
        self.lock().stopping = true;
        self.changed.notify_all();
    }

    /// Makes every pending and future call of all ranks fail, unless the world has failed already.
    pub(super) fn fail(&self, failure: Failure) {
        self.fail_locked(&mut self.lock(), failure);
    }

    fn fail_locked(&self, state: &mut State<M>, failure: Failure) {
        if state.failure.is_none() {
            tracing::debug!(culprit = failure.culprit.0, error = %failure.error, "the world failed");
            state.failure = Some(failure);
            // Before anything is aborted: whoever sees the results of an aborted collective sees this too.
            self.has_failed.store(true, Ordering::SeqCst);
            self.changed.notify_all();
        }
    }

    /// NCCL refused a call of a rank, or failed in the background.
    pub(super) fn fail_nccl(&self, rank: Rank, doing: &str, error: &NcclError) -> CommError {
        let error = CommError::Transport { rank, reason: format!("NCCL: {error}, in {doing}") };
        self.fail(Failure { culprit: rank, error });
        self.check().expect_err("the world has failed")
    }

    /// A rank can not do its part of a collective.
    pub(super) fn fail_rank(&self, rank: Rank, error: &Error) {
        let error = CommError::PeerFailed { rank, reason: error.to_string() };
        self.fail(Failure { culprit: rank, error });
    }

    /// The first failure, if there is one.
    pub(super) fn check(&self) -> Result<(), CommError> {
        if !self.has_failed.load(Ordering::SeqCst) {
            return Ok(());
        }
        match &self.lock().failure {
            Some(failure) => Err(failure.error.clone()),
            None => Ok(()),
        }
    }

    /// The first failure and the rank to blame.
    pub(super) fn failure(&self) -> Option<Failure> {
        self.lock().failure.clone()
    }

    /// Sleeps until something changes, at most for `pause`.
    pub(super) fn pause<'a>(
        &self,
        state: MutexGuard<'a, State<M>>,
        pause: Duration,
    ) -> MutexGuard<'a, State<M>> {
        self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0
    }
}
