//! When to say that one is there, and when not to believe it of others any more.

use std::time::Duration;

use fsdp_core::RunClock;

/// A longer gap between two ticks counts as this many heartbeats: this process was stopped, not the others.
const GAP_HEARTBEATS: u32 = 2;

/// Time as far as this process ran, and its heartbeats.
pub(in crate::process) struct Pulse {
    heartbeat: Duration,
    dead_after: Duration,
    clock: RunClock,
    now: Duration,
    beaten: Duration,
}

impl Pulse {
    /// One heartbeat each `heartbeat`; who says nothing for `dead_after` is dead.
    pub(in crate::process) fn new(heartbeat: Duration, dead_after: Duration) -> Self {
        // A clock counts a tenth of its limit for a gap of any length.
        let clock = RunClock::new(heartbeat * GAP_HEARTBEATS * 10);
        Self { heartbeat, dead_after, clock, now: Duration::ZERO, beaten: Duration::ZERO }
    }

    /// Whether a heartbeat is due.
    pub(super) fn tick(&mut self, passed: Duration) -> bool {
        self.now = self.clock.at(passed);
        let is_due = self.now >= self.beaten + self.heartbeat;
        if is_due {
            self.beaten = self.now;
        }
        is_due
    }

    /// How long this process has run.
    pub(super) fn now(&self) -> Duration {
        self.now
    }

    /// Whether so much has passed since then.
    pub(super) fn is_past(&self, since: Duration, limit: Duration) -> bool {
        self.now >= since + limit
    }

    /// Whether who was heard last at that time is dead.
    pub(super) fn is_dead(&self, heard: Duration) -> bool {
        self.is_past(heard, self.dead_after)
    }

    /// What is said of who is dead.
    pub(super) fn silence(&self) -> String {
        format!("it was silent for {} s", self.dead_after.as_secs_f64())
    }

    /// How long a process that is blamed by another one has to speak for itself.
    pub(super) fn hearing(&self) -> Duration {
        self.heartbeat * 2
    }
}
