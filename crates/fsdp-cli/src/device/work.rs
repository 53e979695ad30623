//! What ranks are for, and what they do.

use std::sync::Arc;

use fsdp_comm::launch::Launcher;
use fsdp_nn::{Backend, HostOptions, HostPool};

use super::clock::Clock;

/// The work of a command on its ranks, on any device.
pub(crate) trait Work {
    /// The result.
    type Outcome;

    /// Does the work.
    fn on<L: Launcher>(self, launcher: &L) -> Self::Outcome
    where
        L::Memory: Backend + Clock;
}

/// What ranks are for. Training shares storage between ranks to save memory; verification gives every rank its own, so that
/// shared state cannot hide a difference between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// They train or are measured.
    Training,
    /// They are compared with the oracle. With `poison`, released contents are overwritten.
    Verification { poison: bool },
}

impl Purpose {
    /// Whether released contents are overwritten.
    pub(super) fn poison(self) -> bool {
        self == Self::Verification { poison: true }
    }

    /// The options of a rank's host memory; ranks that train share `pool`.
    pub(super) fn options(self, pool: &Arc<HostPool>, threads: usize) -> HostOptions {
        let trains = self == Self::Training;
        let pool = if trains { Arc::clone(pool) } else { HostPool::new() };
        HostOptions { pool, threads, poison: self.poison(), resident: !trains }
    }
}
