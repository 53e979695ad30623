//! What can go wrong, and when.

use std::time::Duration;

const MILLI: Duration = Duration::from_millis(1);

/// SplitMix64.
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

/// What can go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The process ends; its machine closes its connections behind what it has sent.
    Kill,
    /// The machine ends: its connections stay open, and silent.
    PowerLoss,
    /// The connection of this process is lost, with what is on its way.
    Cut,
    /// The connection is lost, and only the leader notices.
    CutAtLeader,
    /// The process does not run for so long.
    Stop(Duration),
    /// A rank of it fails.
    Fail,
    /// It finds that a rank of another process has failed, which that one does not know.
    Blame,
    /// The process ends and another one with its index is started.
    Restart,
    /// A second process with its index is started.
    Duplicate,
}

/// Says what was run, when a test fails.
pub(super) struct Case(pub(super) String);

impl Drop for Case {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("{}", self.0);
        }
    }
}
