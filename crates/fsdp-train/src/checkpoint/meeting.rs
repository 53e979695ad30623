//! Where the ranks of this process bring a save together, in memory: what each has written, and how it ended.
//!
//! Ranks write in threads of their own, which wait here and nowhere else: never on a communicator, so that a save can
//! not disturb a step, and never in the file system, which may be what has failed.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fsdp_ckpt::native::RankReport;
use fsdp_core::{Rank, RunClock};

use super::Saved;
use crate::error::TrainError;

/// How many late ranks a message names.
const NAMED_MAX: usize = 8;

/// How a save ended, the same for every rank.
pub(crate) type Outcome = Result<Saved, Arc<SaveFailure>>;

/// Why there is no checkpoint.
#[derive(Debug, thiserror::Error)]
#[error("the checkpoint after step {step} could not be saved: {error}")]
pub struct SaveFailure {
    /// Steps done by the state that was to be saved.
    pub step: u64,
    /// What happened, with the rank where it did.
    pub error: TrainError,
}

/// One save.
pub(super) struct Meeting {
    step: u64,
    shards: usize,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// By shard: nothing while it is being written, or was not begun.
    reports: Vec<Option<Result<RankReport, TrainError>>>,
    begun: usize,
    outcome: Option<Outcome>,
}

impl Meeting {
    /// A save of the state after `step` steps, by `shards` ranks.
    pub(super) fn new(step: u64, shards: usize) -> Self {
        let reports = (0..shards).map(|_| None).collect();
        let state = Mutex::new(State { reports, begun: 0, outcome: None });
        Self { step, shards, state, changed: Condvar::new() }
    }

    /// A rank has begun; every rank calls it once. True for the last.
    pub(super) fn begin(&self) -> bool {
        let mut state = self.lock();
        state.begun += 1;
        state.begun == self.shards
    }

    /// A rank has ended its part.
    pub(super) fn report(&self, shard: usize, report: Result<RankReport, TrainError>) {
        self.lock().reports[shard] = Some(report);
        self.changed.notify_all();
    }

    /// Waits until every rank has ended its part.
    ///
    /// # Errors
    /// The first failure by rank; [`TrainError::SaveLate`] after `limit`; whatever ended the save meanwhile.
    pub(super) fn reports(&self, limit: Duration) -> Result<Vec<RankReport>, TrainError> {
        let begin = Instant::now();
        let mut clock = RunClock::new(limit);
        let mut state = self.lock();
        loop {
            if state.outcome.is_some() {
                return Err(TrainError::SaveAbandoned);
            }
            if state.reports.iter().all(Option::is_some) {
                break;
            }
            if clock.at(begin.elapsed()) >= limit {
                let late = (0..state.reports.len()).filter(|&shard| state.reports[shard].is_none());
                return Err(TrainError::SaveLate { ranks: late.take(NAMED_MAX).map(Rank).collect(), limit });
            }
            state =
                self.changed.wait_timeout(state, clock.interval()).unwrap_or_else(PoisonError::into_inner).0;
        }
        let reports = std::mem::take(&mut state.reports).into_iter().flatten().enumerate();
        let of_rank = |(rank, report): (usize, Result<RankReport, TrainError>)| {
            report.map_err(|source| TrainError::RankFailed { rank: Rank(rank), source: Box::new(source) })
        };
        reports.map(of_rank).collect()
    }

    /// Ends the save, unless it has ended.
    pub(super) fn decide(&self, outcome: Result<Saved, TrainError>) {
        let mut state = self.lock();
        let failed = |error| Arc::new(SaveFailure { step: self.step, error });
        state.outcome.get_or_insert_with(|| outcome.map_err(failed));
        self.changed.notify_all();
    }

    /// Waits until the save has ended.
    pub(super) fn outcome(&self) -> Outcome {
        let mut state = self.lock();
        loop {
            if let Some(outcome) = &state.outcome {
                return outcome.clone();
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether the save has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.lock().outcome.is_some()
    }

    /// The run has failed elsewhere: a save that not every rank has begun will never be complete. One that all have
    /// begun goes on to its end.
    pub(super) fn abandon_unless_all_begun(&self) {
        let all_begun = self.lock().begun == self.shards;
        if !all_begun {
            self.decide(Err(TrainError::SaveAbandoned));
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change under the lock is complete before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
