//! When to send heartbeats, and when a silent process counts as dead.

use std::time::Duration;

use fsdp_core::RunClock;

/// A longer gap between two ticks counts as this many heartbeats: then this process was stopped, not the others.
const GAP_HEARTBEATS: u32 = 2;

/// The running time of this process without pauses, and its heartbeats.
pub(in crate::process) struct Pulse {
    heartbeat: Duration,
    dead_after: Duration,
    clock: RunClock,
    now: Duration,
    last_beat: Duration,
}

impl Pulse {
    /// One heartbeat every `heartbeat`; a process that is silent for `dead_after` counts as dead.
    pub(in crate::process) fn new(heartbeat: Duration, dead_after: Duration) -> Self {
        // A `RunClock` counts at most a tenth of its limit for a gap.
        let clock = RunClock::new(heartbeat * GAP_HEARTBEATS * 10);
        Self { heartbeat, dead_after, clock, now: Duration::ZERO, last_beat: Duration::ZERO }
    }

    /// Advances the time; returns whether a heartbeat is due.
    pub(super) fn tick(&mut self, passed: Duration) -> bool {
        self.now = self.clock.at(passed);
        let is_due = self.now >= self.last_beat + self.heartbeat;
        if is_due {
            self.last_beat = self.now;
        }
        is_due
    }

    /// Running time of this process.
    pub(super) fn now(&self) -> Duration {
        self.now
    }

    /// Whether at least `limit` has passed since `since`.
    pub(super) fn is_past(&self, since: Duration, limit: Duration) -> bool {
        self.now >= since + limit
    }

    /// Whether a process last heard at `last_heard` counts as dead.
    pub(super) fn is_dead(&self, last_heard: Duration) -> bool {
        self.is_past(last_heard, self.dead_after)
    }

    /// The cause reported for a process that counts as dead.
    pub(super) fn silence(&self) -> String {
        format!("it was silent for {} s", self.dead_after.as_secs_f64())
    }

    /// How long a blamed process has to report its own failure.
    pub(super) fn blame_delay(&self) -> Duration {
        self.heartbeat * 2
    }
}
