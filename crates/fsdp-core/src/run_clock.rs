//! Time as far as this process ran, for limits on how long somebody is waited for.
//!
//! A process that is stopped (SIGSTOP, a debugger, a frozen container, a paused machine) finds on its return that much time
//! has passed in which nobody could have come. Whoever waits looks at the clock often, so a long gap between two looks
//! says that nobody ran: of such a gap only a small part is counted.

use std::time::{Duration, Instant};

/// Looks within one limit: a stop counts for at most this part of it.
const LOOKS_PER_LIMIT: u32 = 10;

/// More looks would cost more than they tell.
const INTERVAL_MIN: Duration = Duration::from_millis(1);

/// A clock that is told the time and leaves out what passed while nobody looked.
#[derive(Clone, Copy, Debug)]
pub struct RunClock {
    interval: Duration,
    seen: Instant,
    now: Instant,
}

impl RunClock {
    /// A clock for a limit on waiting, started at `time`.
    pub fn new(limit: Duration, time: Instant) -> Self {
        Self { interval: (limit / LOOKS_PER_LIMIT).max(INTERVAL_MIN), seen: time, now: time }
    }

    /// How long whoever waits may sleep between two looks; a longer gap counts as one interval.
    pub fn interval(&self) -> Duration {
        self.interval
    }

    /// What this clock shows when a real clock shows `time`: to be compared with what it showed before.
    pub fn at(&mut self, time: Instant) -> Instant {
        let gap = time.saturating_duration_since(self.seen);
        self.seen = self.seen.max(time);
        self.now += gap.min(self.interval);
        self.now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);
    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_clock_that_is_looked_at_often_shows_the_time() {
        let start = Instant::now();
        let mut clock = RunClock::new(LIMIT, start);
        for tenths in 1..=200 {
            let time = start + SECOND / 10 * tenths;
            assert_eq!(clock.at(time), time);
        }
    }

    #[test]
    fn a_stop_of_any_length_counts_as_one_interval() {
        for stop in [SECOND, 2 * SECOND, 5 * LIMIT, 1_000_000 * LIMIT] {
            let start = Instant::now();
            let mut clock = RunClock::new(LIMIT, start);
            assert_eq!(clock.interval(), SECOND);
            assert_eq!(clock.at(start + stop), start + SECOND);
            assert_eq!(clock.at(start + stop + SECOND / 2), start + SECOND * 3 / 2);
        }
    }

    #[test]
    fn a_look_that_comes_late_to_the_lock_does_not_turn_the_clock_back() {
        let start = Instant::now();
        let mut clock = RunClock::new(LIMIT, start);
        assert_eq!(clock.at(start + SECOND), start + SECOND);
        assert_eq!(clock.at(start + SECOND / 2), start + SECOND);
        assert_eq!(clock.at(start + SECOND), start + SECOND);
    }

    #[test]
    fn the_shortest_limit_still_leaves_a_pause_between_looks() {
        let clock = RunClock::new(Duration::from_nanos(1), Instant::now());
        assert_eq!(clock.interval(), INTERVAL_MIN);
    }
}
