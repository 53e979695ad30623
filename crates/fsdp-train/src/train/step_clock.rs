//! How long steps take, as far as the host can tell.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Times steps from when they are issued and when their reports are read.
#[derive(Debug, Default)]
pub(super) struct StepClock {
    /// When the step whose report is read next began.
    since: Option<Instant>,
    /// How long it took to issue each step whose report is unread.
    issued: VecDeque<Duration>,
}

impl StepClock {
    /// A step was issued between two times.
    pub(super) fn issued(&mut self, begin: Instant, end: Instant) {
        if self.issued.is_empty() {
            self.since = Some(begin);
        }
        self.issued.push_back(end - begin);
    }

    /// The report of the earliest unread step was read; returns how long the step took.
    ///
    /// This is the time between two reports, but not less than the host took to issue the step: a device that is faster
    /// than the host has finished two steps when the first of them is read. The first step after a pause may include the
    /// issuing of the next one, so then the sum of all steps is longer than the run.
    ///
    /// # Panics
    /// If no step is unread.
    pub(super) fn read(&mut self, now: Instant) -> Duration {
        let issued = self.issued.pop_front().expect("a step was issued");
        let since = self.since.replace(now).expect("a step was issued");
        (now - since).max(issued)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Times in seconds from the same start.
    fn at(seconds: u64) -> Instant {
        static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
        *START + Duration::from_secs(seconds)
    }

    fn seconds(took: Duration) -> u64 {
        took.as_secs()
    }

    #[test]
    fn step_read_immediately_is_timed_from_issue_to_report() {
        let mut clock = StepClock::default();
        clock.issued(at(1), at(3));
        assert_eq!(seconds(clock.read(at(4))), 3);
        // What happened between the steps is part of neither.
        clock.issued(at(10), at(11));
        assert_eq!(seconds(clock.read(at(12))), 2);
    }

    #[test]
    fn steps_of_slow_device_are_timed_from_report_to_report() {
        let mut clock = StepClock::default();
        clock.issued(at(0), at(1));
        clock.issued(at(1), at(2));
        assert_eq!(seconds(clock.read(at(10))), 10);
        clock.issued(at(10), at(11));
        assert_eq!(seconds(clock.read(at(20))), 10);
        assert_eq!(seconds(clock.read(at(30))), 10);
    }

    #[test]
    fn steps_of_fast_device_are_timed_by_host_issue() {
        let mut clock = StepClock::default();
        clock.issued(at(0), at(5));
        clock.issued(at(5), at(10));
        assert_eq!(seconds(clock.read(at(10))), 10);
        clock.issued(at(10), at(15));
        assert_eq!(seconds(clock.read(at(15))), 5);
        // The last report, without another step in between.
        assert_eq!(seconds(clock.read(at(15))), 5);
    }
}
