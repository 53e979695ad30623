//! What a world communicates besides its collectives: values from every rank to the leader, and announcements to all.
//!
//! Collectives carry the training step; an assembly carries what surrounds it (where the run begins, what each rank has
//! saved, whether a save succeeded). It never waits for a device or a queue, so a save cannot disturb a step. For
//! threads it is implemented in memory ([`InMemoryAssembly`]), for processes by their control plane.

mod in_memory;
mod topic_store;

use std::ops::Range;
use std::time::Duration;

use fsdp_core::comm::CommError;
use fsdp_core::{FailureKind, Rank};

pub use in_memory::InMemoryAssembly;
pub(crate) use topic_store::TopicStore;

/// The meeting point of the ranks of a world. Each process holds some of the ranks; the process that holds rank 0 is
/// the leader.
///
/// A topic is a name that all ranks derive from the same facts ("save 3"). Each rank gives one value to a topic, and
/// one process announces one value: the leader, unless the topic defines another.
pub trait Assembly: Send + Sync {
    /// Number of ranks in the world.
    fn world(&self) -> usize;

    /// The ranks that this process holds.
    fn local(&self) -> Range<usize>;

    /// Whether this process holds rank 0.
    fn is_leader(&self) -> bool {
        self.local().start == 0
    }

    /// Gives a value of a rank of this process to a topic. Does not wait.
    ///
    /// # Errors
    /// [`CommError`] if the leader is no longer reachable.
    fn give(&self, topic: &str, rank: Rank, value: Vec<u8>) -> Result<(), CommError>;

    /// Number of ranks known to have given to a topic that has not been collected. To be called on the leader.
    fn given(&self, topic: &str) -> usize;

    /// Waits until ranks `0..ranks` have given to a topic, and takes their values, in rank order. To be called on the
    /// leader.
    ///
    /// # Errors
    /// [`AssemblyError`].
    fn collect(&self, topic: &str, ranks: usize, limit: Duration) -> Result<Vec<Vec<u8>>, AssemblyError>;

    /// Announces a value to all processes. Does not wait.
    ///
    /// # Errors
    /// [`CommError`] if the world has failed.
    fn announce(&self, topic: &str, value: Vec<u8>) -> Result<(), CommError>;

    /// Waits for the announcement of a topic; any number of ranks may.
    ///
    /// # Errors
    /// [`AssemblyError`].
    fn hear(&self, topic: &str, limit: Duration) -> Result<Vec<u8>, AssemblyError>;

    /// Reports to the world that a rank of this process has failed, the kind of the failure, and its cause. Does
    /// nothing by default: within one process, the code that launched the ranks sees the failure.
    fn fail(&self, _rank: Rank, _kind: FailureKind, _cause: String) {}

    /// Ends all present and future waits for a topic in this process with [`AssemblyError::GivenUp`], unless the
    /// awaited values have already arrived.
    fn give_up(&self, topic: &str);
}

/// Why waiting for values or an announcement failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AssemblyError {
    /// Some ranks have not given in time; for an announcement, rank 0 has not made it.
    #[error("{} sent nothing within {} s", join(ranks.iter().map(Rank::to_string)), limit.as_secs_f64())]
    Late {
        /// The ranks that were missing.
        ranks: Vec<Rank>,
        /// The time limit.
        limit: Duration,
    },
    /// This process has [given up](Assembly::give_up) the topic.
    #[error("it was given up")]
    GivenUp,
    /// The world has failed.
    #[error(transparent)]
    Failed(#[from] CommError),
}

/// Maximum number of ranks that a message names.
const NAMED_MAX: usize = 8;

/// Joins names, up to the maximum number for a message.
pub(crate) fn join(names: impl ExactSizeIterator<Item = String>) -> String {
    let more = names.len().saturating_sub(NAMED_MAX);
    let more = (more > 0).then(|| format!("{more} more"));
    names.take(NAMED_MAX).chain(more).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests;
