//! Finds the culprit among ranks that wait for each other.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use fsdp_core::Rank;
use fsdp_core::comm::{CommError, Fingerprint, RankStatus};

use super::Failure;

/// A collective that a rank has not finished, and the ranks that it lacks.
pub struct Wait {
    /// The waiting rank.
    pub rank: Rank,
    /// The call in which it waits.
    pub call: Fingerprint,
    /// Ranks that have not entered it.
    pub missing: Vec<Rank>,
    /// How long it has waited.
    pub waited: Duration,
}

/// The failure to report when a collective cannot end because a rank that it needs has returned.
pub(super) fn deserted(
    waits: &[Wait],
    has_returned: impl Fn(Rank) -> bool,
    status: &dyn Fn() -> Arc<[RankStatus]>,
) -> Option<Failure> {
    waits.iter().find_map(|wait| {
        // The others may still enter.
        let missing: Vec<Rank> = wait.missing.iter().copied().filter(|&rank| has_returned(rank)).collect();
        let culprit = *missing.first()?;
        Some(missing_failure(culprit, wait.call, missing, status))
    })
}

/// The failure to report when no rank can make progress; `None` if no rank is missing anywhere.
pub fn stuck(waits: &[Wait], status: &dyn Fn() -> Arc<[RankStatus]>) -> Option<Failure> {
    let (wait, missing) = blame(waits)?;
    Some(missing_failure(missing[0], wait.call, missing, status))
}

/// The failure to report when a rank has waited for a collective for at least `limit`.
pub fn overdue(waits: &[Wait], limit: Duration, status: &dyn Fn() -> Arc<[RankStatus]>) -> Option<Failure> {
    let late = waits.iter().find(|wait| wait.waited >= limit)?;
    let (Wait { rank, call, .. }, missing) = blame(waits).unwrap_or((late, Vec::new()));
    let culprit = *missing.first().unwrap_or(rank);
    let (seconds, status) = (limit.as_secs(), status());
    let error = CommError::TimedOut { rank: *rank, call: *call, seconds, missing: missing.into(), status };
    Some(Failure { culprit, error })
}

fn missing_failure(
    culprit: Rank,
    call: Fingerprint,
    missing: Vec<Rank>,
    status: &dyn Fn() -> Arc<[RankStatus]>,
) -> Failure {
    Failure { culprit, error: CommError::Missing { missing: missing.into(), call, status: status() } }
}

/// Finds a wait with missing ranks. A missing rank may be waiting itself, so a wait that lacks a rank which does not
/// wait is preferred, and such ranks are listed first.
fn blame(waits: &[Wait]) -> Option<(&Wait, Vec<Rank>)> {
    let waiting = waits.iter().filter(|wait| wait.missing.iter().any(|missing| *missing != wait.rank));
    let waiting: BTreeSet<Rank> = waiting.map(|wait| wait.rank).collect();
    let is_root = |wait: &&Wait| wait.missing.iter().any(|rank| !waiting.contains(rank));
    let lacking = || waits.iter().filter(|wait| !wait.missing.is_empty());
    let wait = lacking().find(is_root).or_else(|| lacking().next())?;
    let (mut named, others): (Vec<_>, Vec<_>) = wait.missing.iter().partition(|rank| !waiting.contains(rank));
    named.extend(others);
    Some((wait, named))
}
