//! Coordinates the ranks of one save: collects what each rank has written and how its part ended.
//!
//! Ranks write in separate threads, which wait only here: never on a communicator, so that a save cannot disturb a
//! step, and never on the file system, which may be what failed.

use std::sync::Arc;
use std::time::Duration;

use fsdp_ckpt::native::RankReport;
use fsdp_comm::assembly::{Assembly, AssemblyError};
use fsdp_core::Rank;

use crate::error::TrainError;
use crate::wire_result;

/// One save, from the view of one rank. Ranks are identified by their shard index.
#[derive(Clone)]
pub(super) struct SaveCoordination {
    assembly: Arc<dyn Assembly>,
    /// Topic on which ranks announce that they have begun.
    begun: String,
    /// Topic on which ranks report how their part ended.
    ended: String,
    shard: usize,
    shards: usize,
}

impl SaveCoordination {
    /// Joins the save with this number, by `shards` ranks, as rank `shard`.
    ///
    /// # Errors
    /// [`TrainError::Core`]: the first rank cannot be reached.
    pub(super) fn begin(
        assembly: &Arc<dyn Assembly>,
        number: u64,
        shard: usize,
        shards: usize,
    ) -> Result<Self, TrainError> {
        let (begun, ended) = (format!("save {number} begun"), format!("save {number} ended"));
        assembly.give(&begun, Rank(shard), Vec::new())?;
        Ok(Self { assembly: Arc::clone(assembly), begun, ended, shard, shards })
    }

    /// Reports how this rank's part ended.
    pub(super) fn report(&self, report: Result<RankReport, TrainError>) {
        // If the first rank cannot receive this, the run has failed, which is reported elsewhere.
        let _ = self.assembly.give(&self.ended, Rank(self.shard), wire_result::encode(report.as_ref()));
    }

    /// Waits, on the first rank, until every rank has ended its part.
    ///
    /// # Errors
    /// The failure of the lowest failed rank; [`TrainError::SaveUnfinished`] after `limit`, or if the save is given up;
    /// [`TrainError::Core`] if a rank is lost before it has ended its part.
    pub(super) fn reports(&self, limit: Duration) -> Result<Vec<RankReport>, TrainError> {
        let reports = self.assembly.collect(&self.ended, self.shards, limit)?;
        // Every rank that has ended has also begun; these values are only discarded.
        let _ = self.assembly.collect(&self.begun, self.shards, Duration::ZERO);
        let of_rank = |(rank, report): (usize, Vec<u8>)| {
            let failed = |source| TrainError::RankFailed { rank: Rank(rank), source: Box::new(source) };
            wire_result::decode(&report).map_err(failed)
        };
        reports.into_iter().enumerate().map(of_rank).collect()
    }

    /// Called on the first rank when the run has failed elsewhere. A save that some rank has not begun will never
    /// complete and is given up; otherwise it continues to its end.
    pub(super) fn abandon_unless_all_begun(&self) {
        if self.assembly.given(&self.begun) < self.shards {
            self.assembly.give_up(&self.ended);
        }
    }
}

impl Drop for SaveCoordination {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // Keeps the first rank from waiting for this one.
            self.report(Err(AssemblyError::GivenUp.into()));
        }
    }
}

#[cfg(test)]
mod tests;
