//! Schedules the ranks of a world on cores, and records whether the world has failed.
//!
//! One lock covers the whole world. Ranks hold it for a few instructions at a time, and at most as many ranks run as
//! there are cores, so it is not contended even with hundreds of ranks. Buffers never pass through it.
//!
//! A free core goes to the lowest rank that is ready: ranks that depend on the same collective then progress together,
//! and no rank starves, because a rank gets no further ahead than the next collective that it waits for. After a
//! failure, all ranks run regardless of cores, to report it.

use std::fmt::Display;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fsdp_comm::rendezvous::{Failure, Group, Position, Rendezvous, Seat, Wait, overdue, stuck};
use fsdp_core::Rank;
use fsdp_core::comm::{CommError, Fingerprint, RankStatus};

use crate::lock::lock;

/// The state of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// It could run, but has no core.
    Ready,
    /// It runs.
    Running,
    /// It waits for the end of a collective.
    Waiting(Seat, Position),
    /// It is kept from making this call.
    Stalled(Fingerprint),
    /// It returned or panicked.
    Ended,
}

#[derive(Debug)]
struct State {
    ranks: Vec<Phase>,
    free_cores: usize,
    rendezvous: Rendezvous<()>,
    last_progress: Instant,
}

impl State {
    fn note_progress(&mut self) {
        self.last_progress = self.rendezvous.now();
    }

    /// The waits of all ranks that lack another rank; each is reported with the duration `waited`.
    fn waits(&self, waited: Duration) -> Vec<Wait> {
        let wait = |(rank, phase): (usize, &Phase)| match *phase {
            Phase::Waiting(seat, position) => Some(self.rendezvous.table.wait(seat, position, waited)),
            Phase::Stalled(call) => Some(Wait { rank: Rank(rank), call, missing: vec![Rank(rank)], waited }),
            Phase::Ready | Phase::Running | Phase::Ended => None,
        };
        let waits = self.ranks.iter().enumerate().filter_map(wait);
        waits.filter(|wait| !wait.missing.is_empty()).collect()
    }

    fn status(&self) -> Arc<[RankStatus]> {
        let table = &self.rendezvous.table;
        let describe = |phase: &Phase| match *phase {
            Phase::Ready => "waits for a core".to_owned(),
            Phase::Running => "runs outside of collectives".to_owned(),
            Phase::Ended => "has returned".to_owned(),
            Phase::Stalled(call) => format!("is kept from {call} by an injected fault"),
            Phase::Waiting(seat, position) => {
                let Wait { call, .. } = table.wait(seat, position, Duration::ZERO);
                format!("waits in {call} of {} ranks", table.members(seat).len())
            }
        };
        let line = |(rank, phase)| RankStatus { rank: Rank(rank), doing: describe(phase) };
        self.ranks.iter().enumerate().map(line).collect()
    }
}

/// The ranks of a world, without their buffers.
#[derive(Debug)]
pub(super) struct RankScheduler {
    state: Mutex<State>,
    /// One per rank, so that only ranks with a reason to wake up do.
    wake: Vec<Condvar>,
}

impl RankScheduler {
    /// Creates ranks that are all ready to run.
    pub(super) fn new(ranks: usize, cores: usize, timeout: Duration) -> Self {
        let mut rendezvous = Rendezvous::new(0..ranks, timeout);
        let last_progress = rendezvous.now();
        let state =
            State { ranks: vec![Phase::Ready; ranks], free_cores: cores.max(1), rendezvous, last_progress };
        Self { state: Mutex::new(state), wake: (0..ranks).map(|_| Condvar::new()).collect() }
    }

    /// The seat of `rank` in a group.
    pub(super) fn seat(&self, group: &Group, rank: Rank) -> Seat {
        lock(&self.state).rendezvous.seat(group, rank, None)
    }

    /// Blocks until `rank` may run.
    pub(super) fn start(&self, rank: Rank) {
        let mut state = lock(&self.state);
        self.assign_cores(&mut state);
        while state.ranks[rank.0] == Phase::Ready && state.rendezvous.failure().is_none() {
            state = self.wake[rank.0].wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Records that `rank` has ended, and its failure, if any.
    pub(super) fn end(&self, rank: Rank, failure: Option<&dyn Display>) {
        let mut state = lock(&self.state);
        state.note_progress();
        // Only the first reason counts, and formatting those of thousands of ranks may take long.
        if let Some(reason) = failure.filter(|_| state.rendezvous.failure().is_none()) {
            self.fail_locked(&mut state, Failure::of_rank(rank, reason.to_string()));
        }
        self.block(&mut state, rank, Phase::Ended);
    }

    /// Enters a rank into its next collective.
    pub(super) fn enter(&self, seat: Seat, call: Fingerprint) -> Result<Position, CommError> {
        let mut state = lock(&self.state);
        state.note_progress();
        state.rendezvous.enter(seat, call).map_err(|failure| {
            let error = failure.error.clone();
            self.fail_locked(&mut state, failure);
            error
        })
    }

    /// Marks a collective as done and wakes the ranks that wait for it.
    pub(super) fn complete(&self, Seat { group, .. }: Seat, position: Position, is_done: &AtomicBool) {
        let mut state = lock(&self.state);
        state.note_progress();
        is_done.store(true, Ordering::Release);
        let waits = |phase: &&mut Phase| matches!(phase, Phase::Waiting(seat, at) if (seat.group, *at) == (group, position));
        state.ranks.iter_mut().filter(waits).for_each(|phase| *phase = Phase::Ready);
        self.assign_cores(&mut state);
    }

    /// Waits for a collective, without holding a core, and ends the call.
    pub(super) fn wait(&self, seat: Seat, position: Position, is_done: &AtomicBool) -> Result<(), CommError> {
        let mut state = lock(&self.state);
        if state.rendezvous.failure().is_none() && !is_done.load(Ordering::Acquire) {
            let rank = state.rendezvous.table.rank(seat);
            self.block(&mut state, rank, Phase::Waiting(seat, position));
            state = self.sleep(state, rank);
        }
        state.rendezvous.check()?;
        state.rendezvous.end_call(seat, position);
        Ok(())
    }

    /// Keeps `rank` from `call` until the world has failed; returns the failure.
    pub(super) fn stall(&self, rank: Rank, call: Fingerprint) -> CommError {
        let mut state = lock(&self.state);
        self.block(&mut state, rank, Phase::Stalled(call));
        let state = self.sleep(state, rank);
        state.rendezvous.check().expect_err("only a failure wakes this rank")
    }

    /// Makes every pending and future collective fail, unless the world has failed already.
    pub(super) fn fail(&self, failure: Failure) {
        self.fail_locked(&mut lock(&self.state), failure);
    }

    /// The first failure; `None` if there is none.
    pub(super) fn failure(&self) -> Option<Failure> {
        lock(&self.state).rendezvous.failure().cloned()
    }

    /// Gives up the core of `rank` and fails the world if no rank can make progress.
    fn block(&self, state: &mut State, rank: Rank, phase: Phase) {
        if std::mem::replace(&mut state.ranks[rank.0], phase) == Phase::Running {
            state.free_cores += 1;
        }
        self.assign_cores(state);
        if !state.ranks.iter().any(|phase| matches!(phase, Phase::Ready | Phase::Running))
            && let Some(failure) = stuck(&state.waits(Duration::ZERO), &|| state.status())
        {
            self.fail_locked(state, failure);
        }
    }

    /// Sleeps until `rank` runs again or the world has failed; fails the world if there is no progress for the time
    /// limit.
    fn sleep<'a>(&self, mut state: MutexGuard<'a, State>, rank: Rank) -> MutexGuard<'a, State> {
        while state.ranks[rank.0] != Phase::Running && state.rendezvous.failure().is_none() {
            let (now, limit) = (state.rendezvous.now(), state.rendezvous.limit());
            let waited = now - state.last_progress;
            if waited >= limit {
                match overdue(&state.waits(waited), limit, &|| state.status()) {
                    Some(failure) => {
                        self.fail_locked(&mut state, failure);
                        break;
                    }
                    // All have entered: the rank that moves the data is slow, but working.
                    None => state.last_progress = now,
                }
            }
            // Waits even if the limit has passed: the rank that moves the data needs the lock to report that it is
            // done.
            let pause = state.rendezvous.interval();
            let woken = self.wake[rank.0].wait_timeout(state, pause);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        state
    }

    /// Gives free cores to the lowest ranks that are ready.
    fn assign_cores(&self, state: &mut State) {
        while state.free_cores > 0 && state.rendezvous.failure().is_none() {
            let Some(rank) = state.ranks.iter().position(|phase| *phase == Phase::Ready) else { return };
            state.ranks[rank] = Phase::Running;
            state.free_cores -= 1;
            self.wake[rank].notify_all();
        }
    }

    fn fail_locked(&self, state: &mut State, failure: Failure) {
        if state.rendezvous.fail(failure) {
            self.wake.iter().for_each(Condvar::notify_all);
        }
    }
}

#[cfg(test)]
mod tests;
