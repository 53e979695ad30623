//! How a world fails: which rank was first, and what it reported.

use std::fmt;
use std::io;

use fsdp_core::Rank;
use fsdp_core::comm::CommError;

/// What became of a rank that did not end well.
#[derive(Debug)]
#[non_exhaustive]
pub enum RankFailure<E> {
    /// It returned an error.
    Error(E),
    /// It panicked, with this message.
    Panic(String),
    /// It reported nothing itself: it never arrived in a collective, or gave one up.
    Comm(CommError),
    /// Its thread could not be started.
    Spawn(io::Error),
}

impl<E: fmt::Display> fmt::Display for RankFailure<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RankFailure::Error(error) => error.fmt(f),
            RankFailure::Panic(message) => write!(f, "panicked: {message}"),
            RankFailure::Comm(error) => error.fmt(f),
            RankFailure::Spawn(error) => write!(f, "its thread could not be started: {error}"),
        }
    }
}

/// A world failed. `rank` is the one that failed first; what the others report is mostly the consequence.
#[derive(Debug, thiserror::Error)]
#[error("{rank} failed first: {cause}")]
pub struct WorldError<E: fmt::Debug + fmt::Display> {
    /// The rank that failed first.
    pub rank: Rank,
    /// What it reported.
    pub cause: Box<RankFailure<E>>,
    /// What every other rank reported that did not end well, in rank order.
    pub others: Vec<(Rank, RankFailure<E>)>,
}

/// The first failure of a world, as the ranks that are still running see it.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    /// The rank to blame.
    pub(crate) culprit: Rank,
    /// What every collective returns from now on.
    pub(crate) error: CommError,
}

impl Failure {
    /// `rank` reported or met `reason`.
    pub(crate) fn of_rank(rank: Rank, reason: String) -> Self {
        Self { culprit: rank, error: CommError::PeerFailed { rank, reason } }
    }
}
