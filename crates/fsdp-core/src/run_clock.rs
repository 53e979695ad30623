//! Time as far as this process ran, for limits on how long somebody is waited for.
//!
//! A process that is stopped (SIGSTOP, a debugger, a frozen container, a paused machine) finds on its return that much time
//! has passed in which nobody could have come. Whoever waits looks at the clock often, so a long gap between two looks
//! says that nobody ran: of such a gap only a small part is counted.

use core::time::Duration;

/// Looks within one limit: a stop counts for at most this part of it.
const LOOKS_PER_LIMIT: u32 = 10;

/// More looks would cost more than they tell.
const INTERVAL_MIN: Duration = Duration::from_millis(1);

/// A clock that is told the time, as what has passed since it was made, and leaves out what passed while nobody looked.
#[derive(Clone, Copy, Debug)]
pub struct RunClock {
    interval: Duration,
    seen: Duration,
    ran: Duration,
}

impl RunClock {
    /// A clock for a limit on waiting.
    pub fn new(limit: Duration) -> Self {
        let interval = (limit / LOOKS_PER_LIMIT).max(INTERVAL_MIN);
        Self { interval, seen: Duration::ZERO, ran: Duration::ZERO }
    }

    /// How long whoever waits may sleep between two looks; a longer gap counts as one interval.
    pub fn interval(&self) -> Duration {
        self.interval
    }

    /// How long this process has run when `passed` has passed.
    pub fn at(&mut self, passed: Duration) -> Duration {
        let gap = passed.saturating_sub(self.seen);
        self.seen = self.seen.max(passed);
        self.ran += gap.min(self.interval);
        self.ran
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);
    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_clock_that_is_looked_at_often_shows_the_time() {
        let mut clock = RunClock::new(LIMIT);
        for tenths in 1..=200 {
            assert_eq!(clock.at(SECOND / 10 * tenths), SECOND / 10 * tenths);
        }
    }

    #[test]
    fn a_stop_of_any_length_counts_as_one_interval() {
        for stop in [SECOND, 2 * SECOND, 5 * LIMIT, 1_000_000 * LIMIT] {
            let mut clock = RunClock::new(LIMIT);
            assert_eq!(clock.interval(), SECOND);
            assert_eq!(clock.at(stop), SECOND);
            assert_eq!(clock.at(stop + SECOND / 2), SECOND * 3 / 2);
        }
    }

    #[test]
    fn a_look_that_comes_late_to_the_lock_does_not_turn_the_clock_back() {
        let mut clock = RunClock::new(LIMIT);
        assert_eq!(clock.at(SECOND), SECOND);
        assert_eq!(clock.at(SECOND / 2), SECOND);
        assert_eq!(clock.at(SECOND), SECOND);
    }

    #[test]
    fn the_shortest_limit_still_leaves_a_pause_between_looks() {
        assert_eq!(RunClock::new(Duration::from_nanos(1)).interval(), INTERVAL_MIN);
    }
}
