//! The faults of a simulation, and when they occur.

use std::time::Duration;

const MILLI: Duration = Duration::from_millis(1);

/// The SplitMix64 generator.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }

    pub(super) fn time(&mut self, from: u64, to: u64) -> Duration {
        MILLI * u32::try_from(from + self.below(to - from)).unwrap()
    }
}

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The process ends; its machine closes its connections after everything it has sent.
    Kill,
    /// The machine loses power: its connections stay open and silent.
    PowerLoss,
    /// The connection of this process is lost, with everything in flight.
    Cut,
    /// The connection is lost, and only the leader notices.
    CutAtLeader,
    /// The process is stopped for this long.
    Stop(Duration),
    /// One of its ranks fails.
    Fail,
    /// It reports the failure of a rank of another process, which that process does not know of.
    Blame,
    /// The process ends, and another one with its index starts.
    Restart,
    /// A second process with its index starts.
    Duplicate,
}

/// Prints the case when a test fails.
pub(super) struct Case(pub(super) String);

impl Drop for Case {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("{}", self.0);
        }
    }
}
