//! How collectives fail.

use std::sync::Arc;

use super::Fingerprint;
use crate::dtype::DType;
use crate::failure::FailureKind;
use crate::rank::Rank;

/// One rank's line of the table that a time-out prints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankStatus {
    /// The rank.
    pub rank: Rank,
    /// What it was last seen doing.
    pub doing: String,
}

/// Failures of collectives. They name ranks of the whole world, not of the group. Every rank gets the same one, so what
/// has an entry per rank is shared.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// Two ranks met in one collective with different calls.
    #[error("collectives diverge: {rank} called {got}, but {peer} called {expected}")]
    Mismatch {
        /// The rank whose call differs.
        rank: Rank,
        /// Its call.
        got: Fingerprint,
        /// The rank that was there first.
        peer: Rank,
        /// The call of `peer`.
        expected: Fingerprint,
    },
    /// Two ranks called collectives of two groups in different orders, and the groups share a connection.
    #[error(
        "collectives diverge: {rank} called {call} of group {group} where {peer} called one of group {peer_group}; \
         these groups are connected once, so their collectives have one order, the same on every rank"
    )]
    Order {
        /// The rank whose call is out of order.
        rank: Rank,
        /// Its call.
        call: Fingerprint,
        /// The group of its call.
        group: String,
        /// The rank that was there first.
        peer: Rank,
        /// The group that `peer` called.
        peer_group: String,
    },
    /// Ranks were started differently.
    #[error(
        "{} would run another schedule, layout or configuration than {reference}: start every rank with the same \
         program, run file and overrides",
        join_ranks(ranks)
    )]
    Differs {
        /// The ranks that differ from most.
        ranks: Vec<Rank>,
        /// The first rank of most.
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
    /// A rank did not arrive: every other one waits or has ended, or the time limit has passed.
    #[error("{} did not arrive in {call}{}", join_ranks(missing), table(status))]
    Missing {
        /// The ranks that did not arrive.
        missing: Arc<[Rank]>,
        /// The collective that waits for them.
        call: Fingerprint,
        /// Who waits where.
        status: Arc<[RankStatus]>,
    },
    /// A collective has not ended in time.
    #[error(
        "{rank} has waited {seconds} s in {call}: {}{}",
        if missing.is_empty() { "all ranks have entered it, but it does not end".to_owned() }
        else { format!("{} did not enter it", join_ranks(missing)) },
        table(status)
    )]
    TimedOut {
        /// A rank that waits.
        rank: Rank,
        /// The collective.
        call: Fingerprint,
        /// The time limit.
        seconds: u64,
        /// The ranks that have not entered it.
        missing: Arc<[Rank]>,
        /// What every rank was last seen doing.
        status: Arc<[RankStatus]>,
    },
    /// The communicator was aborted on this rank.
    #[error("the communicator was aborted on {rank}: {reason}")]
    Aborted {
        /// The rank that aborted.
        rank: Rank,
        /// Why.
        reason: String,
        /// What that calls for.
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
    /// An average of integers, which is none.
    #[error("{call}: integers on {rank} can not be averaged; sum them, and divide where the mean is used")]
    IntegerAverage {
        /// The caller.
        rank: Rank,
        /// The call.
        call: Fingerprint,
    },
    /// A buffer that the collective writes has other readers.
    #[error("{call}: segment {segment} on {rank} is still read elsewhere")]
    Shared {
        /// The caller.
        rank: Rank,
        /// The call.
        call: Fingerprint,
        /// Index of the segment.
        segment: usize,
    },
    /// The transport below failed.
    #[error("{rank}: transport: {reason}")]
    Transport {
        /// The rank on which it failed.
        rank: Rank,
        /// Why.
        reason: String,
    },
}

fn join_ranks(ranks: &[Rank]) -> String {
    ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn table(status: &[RankStatus]) -> String {
    status.iter().map(|line| format!("\n  {}: {}", line.rank, line.doing)).collect()
}
