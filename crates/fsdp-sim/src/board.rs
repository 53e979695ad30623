//! The board: who runs, who waits, and whether the world has failed.
//!
//! One lock for the whole world. Ranks hold it for a few instructions at a time, and at most as many run as
//! there are cores, so it is not contended even with hundreds of ranks. Buffers never pass under it.
//!
//! A core is given to the lowest rank that is ready: ranks that depend on the same collective then progress
//! together, and none starves, because a rank gets no further ahead than the next collective that it
//! waits for. After a failure cores do not matter any more: all ranks run, to report it.

use std::fmt::Display;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fsdp_core::comm::{CommError, Fingerprint};
use fsdp_core::{Rank, RunClock};

use crate::failure::Failure;
use crate::meetings::{Arrival, Doing, MeetingId, Meetings};

#[derive(Debug)]
struct State {
    ranks: Vec<Doing>,
    free_cores: usize,
    meetings: Meetings,
    failure: Option<Failure>,
    start: Instant,
    clock: RunClock,
    /// How long this process had run then.
    last_progress: Duration,
}

impl State {
    fn now(&mut self) -> Duration {
        self.clock.at(self.start.elapsed())
    }

    fn note_progress(&mut self) {
        self.last_progress = self.now();
    }
}

/// The shared state of a world, without its buffers.
#[derive(Debug)]
pub(crate) struct Board {
    state: Mutex<State>,
    /// One per rank, so that only those wake that have a reason to.
    wake: Vec<Condvar>,
    timeout: Duration,
}

impl Board {
    /// A board on which all ranks are ready to run.
    pub(crate) fn new(ranks: usize, cores: usize, timeout: Duration) -> Self {
        let state = State {
            ranks: vec![Doing::Ready; ranks],
            free_cores: cores.max(1),
            meetings: Meetings::default(),
            failure: None,
            start: Instant::now(),
            clock: RunClock::new(timeout),
            last_progress: Duration::ZERO,
        };
        Self { state: Mutex::new(state), wake: (0..ranks).map(|_| Condvar::new()).collect(), timeout }
    }

    /// Blocks until `rank` may run.
    pub(crate) fn enter(&self, rank: Rank) {
        let mut state = self.lock();
        self.grant(&mut state);
        while state.ranks[rank.0] == Doing::Ready && state.failure.is_none() {
            state = self.wake[rank.0].wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Notes that `rank` has ended, and with what.
    pub(crate) fn end(&self, rank: Rank, failed: Option<&dyn Display>) {
        let mut state = self.lock();
        state.note_progress();
        // Only the first reason counts, and those of thousands of ranks may be long.
        if let Some(reason) = failed.filter(|_| state.failure.is_none()) {
            self.fail_locked(&mut state, Failure::of_rank(rank, reason.to_string()));
        }
        self.block(&mut state, rank, Doing::Ended);
    }

    /// Enters a collective; returns whether this rank is the last.
    pub(crate) fn arrive(&self, arrival: Arrival) -> Result<bool, CommError> {
        let mut state = self.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.error.clone());
        }
        state.note_progress();
        let culprit = arrival.members[arrival.index];
        state.meetings.arrive(arrival).inspect_err(|error| {
            self.fail_locked(&mut state, Failure { culprit, error: error.clone() });
        })
    }

    /// Marks a collective as finished and wakes who waits for it.
    pub(crate) fn complete(&self, id: MeetingId) {
        let mut state = self.lock();
        state.note_progress();
        state.meetings.complete(id);
        for doing in state.ranks.iter_mut().filter(|doing| **doing == Doing::Waiting(id)) {
            *doing = Doing::Ready;
        }
        self.grant(&mut state);
    }

    /// Whether [`Board::wait`] would return at once.
    pub(crate) fn is_done(&self, id: MeetingId) -> bool {
        let state = self.lock();
        state.failure.is_some() || state.meetings.is_done(id)
    }

    /// Waits for a collective, without a core, and leaves it.
    pub(crate) fn wait(&self, rank: Rank, id: MeetingId) -> Result<(), CommError> {
        self.wait_then(rank, id, |meetings| meetings.leave(id))
    }

    /// As [`Board::wait`]; the notes of all ranks.
    pub(crate) fn wait_for_notes(&self, rank: Rank, id: MeetingId) -> Result<Vec<usize>, CommError> {
        self.wait_then(rank, id, |meetings| {
            let notes = meetings.notes(id);
            meetings.leave(id);
            notes
        })
    }

    fn wait_then<T>(
        &self,
        rank: Rank,
        id: MeetingId,
        end: impl FnOnce(&mut Meetings) -> T,
    ) -> Result<T, CommError> {
        let mut state = self.lock();
        if state.failure.is_none() && !state.meetings.is_done(id) {
            self.block(&mut state, rank, Doing::Waiting(id));
            state = self.sleep(state, rank);
        }
        match &state.failure {
            Some(failure) => Err(failure.error.clone()),
            None => Ok(end(&mut state.meetings)),
        }
    }

    /// Keeps `rank` from `call` until the world has failed; the failure.
    pub(crate) fn never(&self, rank: Rank, call: Fingerprint) -> CommError {
        let mut state = self.lock();
        self.block(&mut state, rank, Doing::Never(call));
        let state = self.sleep(state, rank);
        let failure = state.failure.as_ref().expect("only a failure wakes this rank");
        failure.error.clone()
    }

    /// Makes every pending and future collective fail, unless the world has failed already.
    pub(crate) fn fail(&self, failure: Failure) {
        self.fail_locked(&mut self.lock(), failure);
    }

    /// The first failure.
    pub(crate) fn failure(&self) -> Option<Failure> {
        self.lock().failure.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change under the lock is complete before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives up the core of `rank` and looks whether anyone can still make progress.
    fn block(&self, state: &mut State, rank: Rank, doing: Doing) {
        if std::mem::replace(&mut state.ranks[rank.0], doing) == Doing::Running {
            state.free_cores += 1;
        }
        self.grant(state);
        if !state.ranks.iter().any(|doing| matches!(doing, Doing::Ready | Doing::Running))
            && let Some(failure) = state.meetings.missing(&state.ranks)
        {
            self.fail_locked(state, failure);
        }
    }

    /// Sleeps until `rank` runs again or the world has failed, which it has when nothing happens for long.
    fn sleep<'a>(&self, mut state: MutexGuard<'a, State>, rank: Rank) -> MutexGuard<'a, State> {
        while state.ranks[rank.0] != Doing::Running && state.failure.is_none() {
            let now = state.now();
            if now - state.last_progress >= self.timeout {
                match state.meetings.missing(&state.ranks) {
                    Some(failure) => {
                        self.fail_locked(&mut state, failure);
                        break;
                    }
                    // All have arrived: the rank that moves the data is slow, but at work.
                    None => state.last_progress = now,
                }
            }
            // Also when the limit has passed: the rank that moves the data needs the lock to say that it is done.
            let pause = state.clock.interval();
            let woken = self.wake[rank.0].wait_timeout(state, pause);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        state
    }

    /// Gives free cores to the lowest ranks that are ready.
    fn grant(&self, state: &mut State) {
        while state.free_cores > 0 && state.failure.is_none() {
            let Some(rank) = state.ranks.iter().position(|doing| *doing == Doing::Ready) else { return };
            state.ranks[rank] = Doing::Running;
            state.free_cores -= 1;
            self.wake[rank].notify_all();
        }
    }

    fn fail_locked(&self, state: &mut State, failure: Failure) {
        if state.failure.is_none() {
            tracing::debug!(culprit = failure.culprit.0, error = %failure.error, "the world failed");
            state.failure = Some(failure);
            self.wake.iter().for_each(Condvar::notify_all);
        }
    }
}

#[cfg(test)]
mod tests;
