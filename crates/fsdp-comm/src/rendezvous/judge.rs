//! What the leader makes of the reports of all processes: who called something else, who is late.
//!
//! A pure function, so that it is tested without processes and time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use fsdp_core::Rank;
use fsdp_core::comm::{CommError, RankStatus};

use super::report::{CallReport, LineReport, Report, RowReport};
use super::waits::{self, Wait};
use super::{Failure, Position};

/// What follows from the reports.
#[derive(Debug)]
pub enum Ruling {
    /// Nothing.
    Fine,
    /// Some calls of this line differ: all processes are to tell all that they have kept, so that the first one is found.
    Ask(Vec<u64>),
    /// The world has failed.
    Failed(Failure),
    /// All ranks have returned.
    Over,
}

/// The lines of all processes, by path.
type Lines<'a> = BTreeMap<&'a [u64], Vec<&'a LineReport>>;

/// Judges one report of each process of a world of so many ranks, in which a collective may take so long.
pub fn judge(reports: &[Report], world: usize, limit: Duration) -> Ruling {
    let mut lines = Lines::new();
    for line in reports.iter().flat_map(|report| &report.lines) {
        lines.entry(&line.path).or_default().push(line);
    }
    if let Some(failure) = lines.values().find_map(|line| divergence(line)) {
        return Ruling::Failed(failure);
    }
    if let Some((path, ranks, reference)) = lines.iter().find_map(|(path, line)| unequal(path, line)) {
        if !reports.iter().all(|report| report.is_full) {
            return Ruling::Ask(path);
        }
        // They parted so long ago that nobody knows in which call.
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

/// The first call of a line that is not the same in all processes. Who differs from most is to blame.
fn divergence(line: &[&LineReport]) -> Option<Failure> {
    let mut by_position: BTreeMap<Position, Vec<&CallReport>> = BTreeMap::new();
    for call in line.iter().flat_map(|line| &line.calls) {
        by_position.entry(call.position).or_default().push(call);
    }
    by_position.into_values().find_map(|calls| {
        let is_same = |one: &CallReport, other: &CallReport| one.call == other.call && one.path == other.path;
        let votes = |call: &CallReport| calls.iter().filter(|other| is_same(call, other)).count();
        // Of equal maxima the last is found, so the first is looked at last.
        let most = calls.iter().rev().max_by_key(|call| votes(call))?;
        let other = calls.iter().find(|call| !is_same(call, most))?;
        let (rank, peer) = (Rank(other.rank), Rank(most.rank));
        let error = if other.path == most.path {
            CommError::Mismatch { rank, got: other.call, peer, expected: most.call }
        } else {
            let (group, peer_group) = (other.group.clone(), most.group.clone());
            CommError::Order { rank, call: other.call, group, peer, peer_group }
        };
        Some(Failure { culprit: rank, error })
    })
}

/// Ranks that have entered as many calls of a line as another one, but not the same, and that other one.
fn unequal(path: &[u64], line: &[&LineReport]) -> Option<(Vec<u64>, Vec<Rank>, Rank)> {
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

/// Who waits in a line. Whoever has not told of the line has not come to it yet.
fn waits_of(line: &[&LineReport], world: usize) -> Vec<Wait> {
    let entered: BTreeMap<usize, Position> =
        line.iter().flat_map(|line| &line.rows).map(|row| (row.rank, row.entered)).collect();
    let wait = |(line, row): (&LineReport, &RowReport)| {
        let wait = row.wait.as_ref()?;
        let has_come = |rank: &usize| entered.get(rank).is_some_and(|&entered| entered > wait.position);
        let all: Vec<usize> =
            if line.members.is_empty() { (0..world).collect() } else { line.members.clone() };
        let missing = all.into_iter().filter(|rank| !has_come(rank)).map(Rank).collect();
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
