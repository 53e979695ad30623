//! Waiting for other ranks by looking into the directory, with a limit and a way to stop.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use fsdp_core::RunClock;

use crate::error::{Error, SaveFault};

const PAUSE_FIRST: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// How long to wait for other ranks.
#[derive(Clone, Copy, Debug)]
pub struct WaitLimit<'a> {
    /// The longest wait, from the moment where this rank has nothing else to do.
    pub limit: Duration,
    /// Ends the wait early when it becomes true.
    pub stop: &'a AtomicBool,
}

/// Why a wait ended without what it was for.
pub(super) enum Unfulfilled {
    Late,
    Stopped,
}

impl WaitLimit<'_> {
    /// Calls `look` until it finds something.
    pub(super) fn until<T>(
        &self,
        mut look: impl FnMut() -> Result<Option<T>, Error>,
    ) -> Result<Result<T, Unfulfilled>, Error> {
        let begin = Instant::now();
        // A process that was stopped in between has not waited.
        let mut clock = RunClock::new(self.limit);
        let mut pause = PAUSE_FIRST;
        loop {
            if let Some(found) = look()? {
                return Ok(Ok(found));
            }
            if self.stop.load(Ordering::Relaxed) {
                return Ok(Err(Unfulfilled::Stopped));
            }
            let left = self.limit.saturating_sub(clock.at(begin.elapsed()));
            if left.is_zero() {
                return Ok(Err(Unfulfilled::Late));
            }
            thread::sleep(pause.min(left).min(clock.interval()));
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }
}

impl Unfulfilled {
    pub(super) fn or_late(self, late: SaveFault) -> SaveFault {
        match self {
            Unfulfilled::Late => late,
            Unfulfilled::Stopped => SaveFault::Stopped,
        }
    }
}
