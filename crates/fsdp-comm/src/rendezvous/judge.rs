//! How the leader evaluates the reports of all processes: which rank made a different call, which is late.
//!
//! A pure function, so it can be tested without processes or time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use fsdp_core::Rank;
use fsdp_core::comm::{CommError, RankStatus};

use super::report::{CallReport, LineReport, Report, RowReport};
use super::waits::{self, Wait};
use super::{Failure, Position};

/// The conclusion from the reports.
#[derive(Debug)]
pub enum Ruling {
    /// No failure.
    Fine,
    /// Some calls of the line with this path differ: all processes must report all calls they have kept for it, to find
    /// the first difference.
    Ask(Vec<u64>),
    /// The world has failed.
    Failed(Failure),
    /// All ranks have returned.
    Over,
}

/// The lines of all processes, by path.
type Lines<'a> = BTreeMap<&'a [u64], Vec<&'a LineReport>>;

/// Judges the reports of all processes (one each) of a world of `world` ranks, in which a collective may take `limit`.
pub fn judge(reports: &[Report], world: usize, limit: Duration) -> Ruling {
    let mut lines = Lines::new();
    for line in reports.iter().flat_map(|report| &report.lines) {
        lines.entry(&line.path).or_default().push(line);
    }
    if let Some(failure) = lines.values().find_map(|line| divergence(line)) {
        return Ruling::Failed(failure);
    }
    if let Some((path, ranks, reference)) =
        lines.iter().find_map(|(path, line)| find_digest_mismatch(path, line))
    {
        if !reports.iter().all(|report| report.is_full) {
            return Ruling::Ask(path);
        }
        // They diverged so long ago that the call is no longer kept.
        let culprit = ranks[0];
        return Ruling::Failed(Failure { culprit, error: CommError::Differs { ranks, reference } });
    }
    let returned: BTreeSet<usize> = reports.iter().flat_map(|report| &report.returned).copied().collect();
    let waits: Vec<Wait> = lines.values().flat_map(|line| waits_of(line, world)).collect();
    let status = || status(reports);
    let failure = waits::deserted(&waits, |rank| returned.contains(&rank.0), &status)
        .or_else(|| waits::overdue(&waits, limit, &status));
    match failure {
        Some(failure) => Ruling::Failed(failure),
        None if returned.len() == world => Ruling::Over,
        None => Ruling::Fine,
    }
}

/// The first call of a line that is not the same in all processes. The rank that differs from the majority is the
/// culprit.
fn divergence(line: &[&LineReport]) -> Option<Failure> {
    let mut by_position: BTreeMap<Position, Vec<&CallReport>> = BTreeMap::new();
    for call in line.iter().flat_map(|line| &line.calls) {
        by_position.entry(call.position).or_default().push(call);
    }
    by_position.into_values().find_map(|calls| {
        let is_same = |a: &CallReport, b: &CallReport| a.call == b.call && a.path == b.path;
        let votes = |call: &CallReport| calls.iter().filter(|other| is_same(call, other)).count();
        // `max_by_key` returns the last of equal maxima, so the order is reversed to get the first.
        let majority = calls.iter().rev().max_by_key(|call| votes(call))?;
        let other = calls.iter().find(|call| !is_same(call, majority))?;
        let (rank, peer) = (Rank(other.rank), Rank(majority.rank));
        let error = if other.path == majority.path {
            CommError::Mismatch { rank, got: other.call, peer, expected: majority.call }
        } else {
            let (group, peer_group) = (other.group.clone(), majority.group.clone());
            CommError::Order { rank, call: other.call, group, peer, peer_group }
        };
        Some(Failure { culprit: rank, error })
    })
}

/// Finds ranks that have entered as many calls of a line as another rank, but different ones; returns the path, these
/// ranks, and that other rank.
fn find_digest_mismatch(path: &[u64], line: &[&LineReport]) -> Option<(Vec<u64>, Vec<Rank>, Rank)> {
    let mut by_entered: BTreeMap<Position, Vec<&RowReport>> = BTreeMap::new();
    for row in line.iter().flat_map(|line| &line.rows) {
        by_entered.entry(row.entered).or_default().push(row);
    }
    by_entered.into_values().find_map(|rows| {
        let differing: Vec<Rank> =
            rows.iter().filter(|row| row.digest != rows[0].digest).map(|row| Rank(row.rank)).collect();
        (!differing.is_empty()).then(|| (path.to_vec(), differing, Rank(rows[0].rank)))
    })
}

/// The waiting ranks of a line. A rank that has not reported the line has not entered it yet.
fn waits_of(line: &[&LineReport], world: usize) -> Vec<Wait> {
    let entered: BTreeMap<usize, Position> =
        line.iter().flat_map(|line| &line.rows).map(|row| (row.rank, row.entered)).collect();
    let wait = |(line, row): (&LineReport, &RowReport)| {
        let wait = row.wait.as_ref()?;
        let has_entered = |rank: &usize| entered.get(rank).is_some_and(|&entered| entered > wait.position);
        let all: Vec<usize> =
            if line.members.is_empty() { (0..world).collect() } else { line.members.clone() };
        let missing = all.into_iter().filter(|rank| !has_entered(rank)).map(Rank).collect();
        let waited = Duration::from_millis(wait.waited_ms);
        Some(Wait { rank: Rank(row.rank), call: wait.call, missing, waited })
    };
    line.iter().flat_map(|line| line.rows.iter().map(|row| (*line, row))).filter_map(wait).collect()
}

fn status(reports: &[Report]) -> Arc<[RankStatus]> {
    let all = reports.iter().flat_map(|report| &report.status);
    all.map(|(rank, doing)| RankStatus { rank: Rank(*rank), doing: doing.clone() }).collect()
}

#[cfg(test)]
mod tests;
