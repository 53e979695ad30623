//! Who waits for whom, and who is to blame.

use std::sync::Arc;
use std::time::Duration;

use fsdp_core::Rank;
use fsdp_core::comm::{CommError, Fingerprint, RankStatus};

/// The rank to blame, and what every call returns from now on.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) culprit: Rank,
    pub(super) error: CommError,
}

/// The first collective that a rank has not ended, and who keeps it from ending.
pub(super) struct Wait {
    pub(super) rank: Rank,
    pub(super) call: Fingerprint,
    pub(super) missing: Vec<Rank>,
    pub(super) waited: Duration,
}

/// The failure to report when a collective can not end because a rank that it needs has returned.
pub(super) fn deserted(
    waits: &[Wait],
    has_returned: impl Fn(Rank) -> bool,
    status: &dyn Fn() -> Arc<[RankStatus]>,
) -> Option<Failure> {
    waits.iter().find_map(|wait| {
        // The others may still come.
        let missing: Arc<[Rank]> = wait.missing.iter().copied().filter(|&rank| has_returned(rank)).collect();
        let culprit = *missing.first()?;
        let (call, status) = (wait.call, status());
        Some(Failure { culprit, error: CommError::Missing { missing, call, status } })
    })
}

/// The failure to report when a collective has been outstanding for `limit`.
pub(super) fn overdue(
    waits: &[Wait],
    limit: Duration,
    status: &dyn Fn() -> Arc<[RankStatus]>,
) -> Option<Failure> {
    let late = waits.iter().find(|wait| wait.waited >= limit)?;
    // Who is waited for may wait itself: for somebody that waits for nobody.
    let waits_for_another =
        |rank: &Rank| waits.iter().any(|wait| wait.rank == *rank && !wait.missing.is_empty());
    let is_root = |wait: &&Wait| wait.missing.iter().any(|rank| !waits_for_another(rank));
    let Wait { rank, call, missing, .. } = waits.iter().find(is_root).unwrap_or(late);
    // Who waits for nobody comes first: that one is blamed.
    let (mut named, others): (Vec<_>, Vec<_>) = missing.iter().partition(|rank| !waits_for_another(rank));
    named.extend(others);
    let culprit = *named.first().unwrap_or(rank);
    let (seconds, status) = (limit.as_secs(), status());
    let error = CommError::TimedOut { rank: *rank, call: *call, seconds, missing: named.into(), status };
    Some(Failure { culprit, error })
}
