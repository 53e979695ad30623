//! Where the ranks of a world bring a save together: what each has written, and how it ended.
//!
//! Ranks write in threads of their own, which wait here and nowhere else: never on a communicator, so that a save can
//! not disturb a step, and never in the file system, which may be what has failed.

use std::sync::Arc;
use std::time::Duration;

use fsdp_ckpt::native::RankReport;
use fsdp_comm::assembly::{Assembly, AssemblyError};
use fsdp_core::Rank;

use super::Saved;
use crate::error::TrainError;
use crate::told;

/// How many late ranks a message names.
const NAMED_MAX: usize = 8;

/// How a save ended.
pub(crate) type Outcome = Result<Saved, Arc<SaveFailure>>;

/// Why there is no checkpoint.
#[derive(Debug, thiserror::Error)]
#[error("the checkpoint after step {step} could not be saved: {error}")]
pub struct SaveFailure {
    /// Steps done by the state that was to be saved.
    pub step: u64,
    /// What happened, with the rank where it did.
    pub error: TrainError,
}

/// One save, as one rank sees it. Ranks have the numbers of their shards.
#[derive(Clone)]
pub(super) struct Meeting {
    assembly: Arc<dyn Assembly>,
    /// Where ranks say that they have begun.
    begun: String,
    /// Where they say how their part has ended.
    ended: String,
    shard: usize,
    shards: usize,
}

impl Meeting {
    /// The save of this number, by `shards` ranks, of which this one is `shard`.
    ///
    /// # Errors
    /// [`TrainError::Core`]: the first rank can not be reached.
    pub(super) fn begin(
        assembly: &Arc<dyn Assembly>,
        number: u64,
        shard: usize,
        shards: usize,
    ) -> Result<Self, TrainError> {
        let (begun, ended) = (format!("save {number} begun"), format!("save {number} ended"));
        assembly.give(&begun, Rank(shard), Vec::new()).map_err(fsdp_core::Error::from)?;
        Ok(Self { assembly: Arc::clone(assembly), begun, ended, shard, shards })
    }

    /// This rank has ended its part.
    pub(super) fn report(&self, report: Result<RankReport, TrainError>) {
        // If the first rank is not there to hear it, the run has failed, which is told elsewhere.
        let _ = self.assembly.give(&self.ended, Rank(self.shard), told::encode(report.as_ref()));
    }

    /// On the first rank: waits until every rank has ended its part.
    ///
    /// # Errors
    /// The first failure by rank; [`TrainError::SaveLate`] after `limit`; [`TrainError::SaveAbandoned`];
    /// [`TrainError::Core`]: ranks that have not ended their part are lost.
    pub(super) fn reports(&self, limit: Duration) -> Result<Vec<RankReport>, TrainError> {
        let reports = self.assembly.collect(&self.ended, self.shards, limit).map_err(not_heard)?;
        // Whoever has ended has begun.
        let _ = self.assembly.collect(&self.begun, self.shards, Duration::ZERO);
        let of_rank = |(rank, report): (usize, Vec<u8>)| {
            let failed = |source| TrainError::RankFailed { rank: Rank(rank), source: Box::new(source) };
            told::decode(&report).map_err(failed)
        };
        reports.into_iter().enumerate().map(of_rank).collect()
    }

    /// On the first rank: the run has failed elsewhere. A save that not every rank has begun will never be complete;
    /// one that all have begun goes on to its end.
    pub(super) fn abandon_unless_all_begun(&self) {
        if self.assembly.given(&self.begun) < self.shards {
            self.assembly.give_up(&self.ended);
        }
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // So that nobody waits for this rank.
            self.report(Err(TrainError::SaveAbandoned));
        }
    }
}

/// Why nothing was heard of other ranks.
pub(crate) fn not_heard(error: AssemblyError) -> TrainError {
    match error {
        AssemblyError::Late { mut ranks, limit } => {
            ranks.truncate(NAMED_MAX);
            TrainError::SaveLate { ranks, limit }
        }
        AssemblyError::GivenUp => TrainError::SaveAbandoned,
        AssemblyError::Failed(error) => fsdp_core::Error::from(error).into(),
    }
}

#[cfg(test)]
mod tests;
