//! Time during which this process ran, for limits on how long to wait for others.
//!
//! A process that is stopped (SIGSTOP, a debugger, a frozen container, a suspended machine) sees a jump in time when it
//! resumes, during which nothing could have arrived. Waiters read the clock often, so a long gap between two readings
//! means that the process did not run; only a small part of such a gap is counted.

use core::time::Duration;

/// Number of intervals per limit: a stop counts for at most one of them.
const READINGS_PER_LIMIT: u32 = 10;

/// The shortest interval: reading the clock more often would cost more than it tells.
const INTERVAL_MIN: Duration = Duration::from_millis(1);

/// A clock that is passed the time since its creation, and leaves out gaps during which it was not read.
#[derive(Clone, Copy, Debug)]
pub struct RunClock {
    interval: Duration,
    last_reading: Duration,
    ran: Duration,
}

impl RunClock {
    /// Creates a clock for a limit on waiting.
    pub fn new(limit: Duration) -> Self {
        let interval = (limit / READINGS_PER_LIMIT).max(INTERVAL_MIN);
        Self { interval, last_reading: Duration::ZERO, ran: Duration::ZERO }
    }

    /// Longest time a waiter may sleep between two readings; a longer gap counts as one interval.
    pub fn interval(&self) -> Duration {
        self.interval
    }

    /// Returns how long this process has run, given that `elapsed` has passed since the clock's creation.
    pub fn at(&mut self, elapsed: Duration) -> Duration {
        let gap = elapsed.saturating_sub(self.last_reading);
        self.last_reading = self.last_reading.max(elapsed);
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
    fn clock_read_often_matches_elapsed_time() {
        let mut clock = RunClock::new(LIMIT);
        for tenths in 1..=200 {
            assert_eq!(clock.at(SECOND / 10 * tenths), SECOND / 10 * tenths);
        }
    }

    #[test]
    fn pause_of_any_length_counts_as_one_interval() {
        for stop in [SECOND, 2 * SECOND, 5 * LIMIT, 1_000_000 * LIMIT] {
            let mut clock = RunClock::new(LIMIT);
            assert_eq!(clock.interval(), SECOND);
            assert_eq!(clock.at(stop), SECOND);
            assert_eq!(clock.at(stop + SECOND / 2), SECOND * 3 / 2);
        }
    }

    #[test]
    fn late_reading_does_not_move_clock_back() {
        let mut clock = RunClock::new(LIMIT);
        assert_eq!(clock.at(SECOND), SECOND);
        assert_eq!(clock.at(SECOND / 2), SECOND);
        assert_eq!(clock.at(SECOND), SECOND);
    }

    #[test]
    fn shortest_limit_uses_minimum_interval() {
        assert_eq!(RunClock::new(Duration::from_nanos(1)).interval(), INTERVAL_MIN);
    }
}
