//! What a world agrees on beside its collectives: values that ranks give to the first one, and what processes announce.
//!
//! Collectives carry the step; this carries what surrounds it (where the run begins, what each rank has saved, how a
//! save ended). It never waits for a device or for a queue, so that a save can not disturb a step. Threads implement
//! it in memory ([`InMemoryAssembly`]), processes over their control plane.

mod board;
mod in_memory;

use std::ops::Range;
use std::time::Duration;

use fsdp_core::comm::CommError;
use fsdp_core::{FailureKind, Rank};

pub(crate) use board::Board;
pub use in_memory::InMemoryAssembly;

/// Where the ranks of a world come together. A process holds some of them; the process that holds rank 0 is the
/// leader.
///
/// A topic is a name that all ranks derive from the same facts ("save 3"). Each rank gives to a topic once, and one process,
/// which is the leader unless the topic says another, announces it once.
pub trait Assembly: Send + Sync {
    /// Number of ranks in the world.
    fn world(&self) -> usize;

    /// The ranks of this process.
    fn local(&self) -> Range<usize>;

    /// Whether this process holds rank 0.
    fn is_leader(&self) -> bool {
        self.local().start == 0
    }

    /// A rank of this process gives a value to a topic. Does not wait.
    ///
    /// # Errors
    /// [`CommError`]: the leader can not be reached any more.
    fn give(&self, topic: &str, rank: Rank, value: Vec<u8>) -> Result<(), CommError>;

    /// How many ranks are known to have given to a topic, and have not been collected. On the leader.
    fn given(&self, topic: &str) -> usize;

    /// Waits until ranks 0 to `ranks` have given to a topic, and takes what they gave, in rank order. On the leader.
    ///
    /// # Errors
    /// [`AssemblyError`].
    fn collect(&self, topic: &str, ranks: usize, limit: Duration) -> Result<Vec<Vec<u8>>, AssemblyError>;

    /// Tells all processes. Does not wait.
    ///
    /// # Errors
    /// [`CommError`]: the world has failed.
    fn announce(&self, topic: &str, value: Vec<u8>) -> Result<(), CommError>;

    /// Waits for what is announced; any number of ranks may.
    ///
    /// # Errors
    /// [`AssemblyError`].
    fn hear(&self, topic: &str, limit: Duration) -> Result<Vec<u8>, AssemblyError>;

    /// Tells the world that a rank of this process has failed, what that calls for, and why. In one process whoever has
    /// launched the ranks sees it.
    fn fail(&self, _rank: Rank, _kind: FailureKind, _cause: String) {}

    /// Ends all waiting for a topic in this process, now and later: with [`AssemblyError::GivenUp`], unless what is waited
    /// for is there already.
    fn give_up(&self, topic: &str);
}

/// Why nothing was collected or heard.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AssemblyError {
    /// Ranks have not given in time; or, when something is to be heard, the first one has not announced it.
    #[error("{} said nothing within {} s", join(ranks.iter().map(Rank::to_string)), limit.as_secs_f64())]
    Late {
        /// Who was waited for.
        ranks: Vec<Rank>,
        /// How long.
        limit: Duration,
    },
    /// Somebody in this process has [given up](Assembly::give_up) the topic.
    #[error("it was given up")]
    GivenUp,
    /// The world has failed.
    #[error(transparent)]
    Failed(#[from] CommError),
}

/// How many ranks a message names.
const NAMED_MAX: usize = 8;

/// Names, as many as a message has room for.
pub(crate) fn join(names: impl ExactSizeIterator<Item = String>) -> String {
    let more = names.len().saturating_sub(NAMED_MAX);
    let more = (more > 0).then(|| format!("{more} more"));
    names.take(NAMED_MAX).chain(more).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests;
