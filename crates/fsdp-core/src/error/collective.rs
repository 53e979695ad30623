//! Errors of collectives.

use std::sync::Arc;

use crate::collective::Fingerprint;
use crate::dtype::DType;
use crate::failure::FailureKind;
use crate::rank::Rank;

/// One rank's line in the table that a time-out prints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankStatus {
    /// The rank.
    pub rank: Rank,
    /// The operation that the rank was last seen in.
    pub doing: String,
}

/// Errors of collectives. They name ranks of the world, not of the group. Every rank gets the same error, so fields
/// with an entry per rank are shared.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// Two ranks entered one collective with different calls.
    #[error("collectives diverge: {rank} called {got}, but {peer} called {expected}")]
    Mismatch {
        /// The rank whose call differs.
        rank: Rank,
        /// Its call.
        got: Fingerprint,
        /// The rank that entered first.
        peer: Rank,
        /// The call of `peer`.
        expected: Fingerprint,
    },
    /// Two ranks called collectives of two groups in different orders, and these groups share a connection.
    #[error(
        "collectives diverge: {rank} called {call} of group {group}, but {peer} called one of group {peer_group}; \
         these groups share a connection, so every rank must call their collectives in the same order"
    )]
    Order {
        /// The rank whose call is out of order.
        rank: Rank,
        /// Its call.
        call: Fingerprint,
        /// The group of its call.
        group: String,
        /// The rank that entered first.
        peer: Rank,
        /// The group that `peer` called.
        peer_group: String,
    },
    /// Some ranks were started with different settings.
    #[error(
        "{} would run a different schedule, layout or configuration than {reference}: start every rank with the \
         same program, run file and overrides",
        join_ranks(ranks)
    )]
    Differs {
        /// The ranks outside the largest group of equal ranks.
        ranks: Vec<Rank>,
        /// The first rank of that group.
        reference: Rank,
    },
    /// Another rank failed; nothing more can be communicated.
    #[error("{rank} failed: {reason}")]
    PeerFailed {
        /// The first rank that failed.
        rank: Rank,
        /// Why it failed.
        reason: String,
    },
    /// A rank did not enter the collective: all others wait or have ended, or the time limit has passed.
    #[error("{} did not arrive in {call}{}", join_ranks(missing), table(status))]
    Missing {
        /// The ranks that did not arrive.
        missing: Arc<[Rank]>,
        /// The collective that waits for them.
        call: Fingerprint,
        /// The last known operation of every rank.
        status: Arc<[RankStatus]>,
    },
    /// A collective did not finish within the time limit.
    #[error(
        "{rank} has waited {seconds} s in {call}: {}{}",
        if missing.is_empty() { "all ranks have entered it, but it has not finished".to_owned() }
        else { format!("{} did not enter it", join_ranks(missing)) },
        table(status)
    )]
    TimedOut {
        /// A rank that is waiting.
        rank: Rank,
        /// The collective.
        call: Fingerprint,
        /// The time limit.
        seconds: u64,
        /// The ranks that have not entered it.
        missing: Arc<[Rank]>,
        /// The last known operation of every rank.
        status: Arc<[RankStatus]>,
    },
    /// The communicator was aborted on this rank.
    #[error("the communicator was aborted on {rank}: {reason}")]
    Aborted {
        /// The rank that aborted.
        rank: Rank,
        /// The reason given to the abort.
        reason: String,
        /// Whether a retry can help.
        kind: FailureKind,
    },
    /// A buffer has the wrong length.
    #[error("{call}: segment {segment} has {got} elements on {rank}, expected {expected}")]
    Length {
        /// The caller.
        rank: Rank,
        /// The call.
        call: Fingerprint,
        /// Index of the segment.
        segment: usize,
        /// Expected elements.
        expected: usize,
        /// Elements found.
        got: usize,
    },
    /// A buffer has the wrong dtype.
    #[error("{call}: segment {segment} is {got} on {rank}, expected {expected}")]
    Type {
        /// The caller.
        rank: Rank,
        /// The call.
        call: Fingerprint,
        /// Index of the segment.
        segment: usize,
        /// Expected dtype.
        expected: DType,
        /// Dtype found.
        got: DType,
    },
    /// An average of integers, which is undefined.
    #[error("{call}: integers on {rank} cannot be averaged; sum them and divide where the mean is used")]
    IntegerAverage {
        /// The caller.
        rank: Rank,
        /// The call.
        call: Fingerprint,
    },
    /// A buffer that the collective writes has other handles.
    #[error("{call}: segment {segment} on {rank} is still read elsewhere")]
    Shared {
        /// The caller.
        rank: Rank,
        /// The call.
        call: Fingerprint,
        /// Index of the segment.
        segment: usize,
    },
    /// The underlying transport failed.
    #[error("{rank}: transport: {reason}")]
    Transport {
        /// The rank on which it failed.
        rank: Rank,
        /// Why.
        reason: String,
    },
}

impl CommError {
    /// Classifies this failure. A rank that failed without a reported kind counts as temporary: it may succeed next
    /// time.
    pub fn kind(&self) -> FailureKind {
        match self {
            CommError::Mismatch { .. }
            | CommError::Order { .. }
            | CommError::Differs { .. }
            | CommError::Length { .. }
            | CommError::Type { .. }
            | CommError::IntegerAverage { .. }
            | CommError::Shared { .. } => FailureKind::Permanent,
            CommError::PeerFailed { .. }
            | CommError::Missing { .. }
            | CommError::TimedOut { .. }
            | CommError::Transport { .. } => FailureKind::Temporary,
            CommError::Aborted { kind, .. } => *kind,
        }
    }
}

fn join_ranks(ranks: &[Rank]) -> String {
    ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn table(status: &[RankStatus]) -> String {
    status.iter().map(|line| format!("\n  {}: {}", line.rank, line.doing)).collect()
}
