//! The table of the ranks of this process: which collectives each of them has issued on each communicator, and which have
//! ended.
//!
//! Plain data without locks, threads or clocks: [`World`](super::world::World) keeps it behind its lock and says what
//! time it is. With it, a call that differs from those of the other ranks is refused before it is issued, and a
//! time-out knows who did not come. A group is what a rank sees, with a name and calls of its own; a [`Line`] is the NCCL
//! communicator below, which groups of the same ranks may share.

mod line;
mod tell;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fsdp_core::Rank;
use fsdp_core::comm::{CommError, Fingerprint, RankStatus};

pub(super) use line::Position;
use line::{Different, Line};

use super::waits::{self, Failure, Wait};

/// Which communicator, and which of its ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seat {
    pub(super) group: usize,
    pub(super) index: usize,
}

/// A collective that a rank has entered and that has not ended on it.
#[derive(Debug)]
struct Outstanding<E> {
    position: Position,
    call: Fingerprint,
    /// Set when the call is with the device: the point in its queue behind the collective.
    event: Option<E>,
}

/// One rank of a communicator.
#[derive(Debug)]
struct Row<E> {
    latest: Option<Fingerprint>,
    ended: Option<(Position, Fingerprint)>,
    outstanding: VecDeque<Outstanding<E>>,
    /// Since when the first of them is the first.
    since: Instant,
}

#[derive(Debug)]
struct Group<E> {
    name: String,
    path: Vec<u64>,
    members: Arc<[Rank]>,
    rows: Vec<Row<E>>,
    /// The NCCL communicator.
    line: usize,
}

#[derive(Debug)]
pub(super) struct Table<E> {
    groups: Vec<Group<E>>,
    lines: Vec<Line>,
    by_path: BTreeMap<Vec<u64>, usize>,
    /// The ranks of this process, and those of them that have returned.
    here: Range<usize>,
    ended: BTreeSet<Rank>,
}

impl<E> Table<E> {
    /// A table of the ranks `here`.
    pub(super) fn new(here: Range<usize>) -> Self {
        let (groups, lines, by_path) = Default::default();
        Self { groups, lines, by_path, here, ended: BTreeSet::new() }
    }

    /// The seat of `rank` in the group at `path`, which is made by the first of its members that asks: on an NCCL
    /// communicator of its own, or on that of another group of the same ranks.
    pub(super) fn seat(
        &mut self,
        path: &[u64],
        name: &str,
        members: &Arc<[Rank]>,
        rank: Rank,
        shares: Option<Seat>,
        now: Instant,
    ) -> Seat {
        let next = self.groups.len();
        let group = *self.by_path.entry(path.to_vec()).or_insert(next);
        if group == next {
            let line = shares.map_or(self.lines.len(), |other| self.groups[other.group].line);
            if line == self.lines.len() {
                let is_here = |&index: &usize| self.here.contains(&members[index].0);
                self.lines.push(Line::new(members.clone(), (0..members.len()).filter(is_here).collect()));
            }
            let row = |_| Row { latest: None, ended: None, outstanding: VecDeque::new(), since: now };
            self.groups.push(Group {
                name: name.to_owned(),
                path: path.to_vec(),
                members: members.clone(),
                rows: (0..members.len()).map(row).collect(),
                line,
            });
        }
        let index = members.iter().position(|&member| member == rank);
        Seat { group, index: index.expect("a rank asks for groups that it belongs to") }
    }

    /// The ranks of a communicator.
    pub(super) fn members(&self, seat: Seat) -> Arc<[Rank]> {
        self.groups[seat.group].members.clone()
    }

    /// Enters a rank into its next call, unless another rank called something else at this place of the NCCL
    /// communicator.
    pub(super) fn enter(
        &mut self,
        seat: Seat,
        call: Fingerprint,
        now: Instant,
    ) -> Result<Position, CommError> {
        let group = &self.groups[seat.group];
        let position = self.lines[group.line]
            .enter(seat.index, seat.group, &group.path, call)
            .map_err(|different| self.divergence(seat, call, &different))?;
        let row = &mut self.groups[seat.group].rows[seat.index];
        row.latest = Some(call);
        if row.outstanding.is_empty() {
            row.since = now;
        }
        row.outstanding.push_back(Outstanding { position, call, event: None });
        Ok(position)
    }

    fn divergence(&self, seat: Seat, call: Fingerprint, different: &Different) -> CommError {
        let (rank, peer) = (self.groups[seat.group].members[seat.index], different.peer);
        if different.group == seat.group {
            return CommError::Mismatch { rank, got: call, peer, expected: different.call };
        }
        let name = |group: usize| self.groups[group].name.clone();
        CommError::Order { rank, call, group: name(seat.group), peer, peer_group: name(different.group) }
    }

    /// Notes that a call is with the device, and ends at `event`.
    pub(super) fn issued(&mut self, seat: Seat, position: Position, event: E) {
        let row = &mut self.groups[seat.group].rows[seat.index];
        let found = row.outstanding.iter_mut().find(|outstanding| outstanding.position == position);
        found.expect("a call is outstanding until it has ended").event = Some(event);
    }

    /// Notes that a call that the device has no part in has ended.
    pub(super) fn end_call(&mut self, seat: Seat, position: Position, now: Instant) {
        let row = &mut self.groups[seat.group].rows[seat.index];
        let found = row.outstanding.iter().position(|outstanding| outstanding.position == position);
        let ended = found.and_then(|at| row.outstanding.remove(at));
        row.ended = Some((position, ended.expect("a call ends once").call));
        row.since = now;
    }

    /// Notes that a rank has ended.
    pub(super) fn end_rank(&mut self, rank: Rank) {
        self.ended.insert(rank);
    }

    /// Takes calls out whose event has passed, as `is_past` says for an event of a rank.
    pub(super) fn settle<X>(
        &mut self,
        now: Instant,
        mut is_past: impl FnMut(Rank, &E) -> Result<bool, X>,
    ) -> Result<(), (Rank, X)> {
        for group in &mut self.groups {
            for (&rank, row) in group.members.iter().zip(&mut group.rows) {
                while let Some(Outstanding { event: Some(event), call, position }) = row.outstanding.front() {
                    if !is_past(rank, event).map_err(|error| (rank, error))? {
                        break;
                    }
                    row.ended = Some((*position, *call));
                    row.since = now;
                    row.outstanding.pop_front();
                }
            }
        }
        Ok(())
    }

    /// Whether nothing is outstanding on any rank.
    pub(super) fn is_idle(&self) -> bool {
        self.groups.iter().flat_map(|group| &group.rows).all(|row| row.outstanding.is_empty())
    }

    /// The call that a rank is in on the NCCL communicator of `seat`, or else the last one that has ended there.
    pub(super) fn current(&self, seat: Seat) -> Option<Fingerprint> {
        let line = self.groups[seat.group].line;
        let rows =
            || self.groups.iter().filter(|group| group.line == line).map(|group| &group.rows[seat.index]);
        let first = rows().filter_map(|row| row.outstanding.front()).min_by_key(|first| first.position);
        let last = || rows().filter_map(|row| row.ended).max_by_key(|&(position, _)| position);
        first.map(|first| first.call).or_else(|| last().map(|(_, call)| call))
    }

    /// The failure to report when a collective can not end because a rank that it needs has ended, or when one has
    /// been outstanding for `limit`. Of other processes nothing is known here.
    pub(super) fn overdue(&self, now: Instant, limit: Duration) -> Option<Failure> {
        let (waits, status) = (self.waits(now), || self.status());
        waits::deserted(&waits, |rank| self.ended.contains(&rank), &status)
            .or_else(|| waits::overdue(&waits, limit, &status))
    }

    /// A rank and the call in which it has waited for `limit`.
    pub(super) fn waiting(&self, now: Instant, limit: Duration) -> Option<(Rank, Fingerprint)> {
        let waits = self.waits(now);
        waits.iter().find(|wait| wait.waited >= limit).map(|wait| (wait.rank, wait.call))
    }

    fn waits(&self, now: Instant) -> Vec<Wait> {
        let mut waits = Vec::new();
        for group in &self.groups {
            for (&rank, row) in group.members.iter().zip(&group.rows) {
                if let Some(front) = row.outstanding.front() {
                    let missing = self.lines[group.line].missing(front.position);
                    let waited = now.saturating_duration_since(row.since);
                    waits.push(Wait { rank, call: front.call, missing, waited });
                }
            }
        }
        waits
    }

    /// What every rank of this process has issued last and ended last, on every communicator.
    pub(super) fn status(&self) -> Arc<[RankStatus]> {
        let line = |rank: Rank| {
            let of_group = |group: &Group<E>| {
                let index = group.members.iter().position(|&member| member == rank)?;
                let row = &group.rows[index];
                let latest = row.latest?;
                Some(match row.ended {
                    Some((_, ended)) if ended == latest => format!("{}: ended {ended}", group.name),
                    Some((_, ended)) => format!("{}: issued {latest}, ended {ended}", group.name),
                    None => format!("{}: issued {latest}, ended none", group.name),
                })
            };
            let mut parts: Vec<String> = self.groups.iter().filter_map(of_group).collect();
            if self.ended.contains(&rank) {
                parts.insert(0, "has returned".to_owned());
            } else if parts.is_empty() {
                parts.push("has issued nothing".to_owned());
            }
            RankStatus { rank, doing: parts.join("; ") }
        };
        self.here.clone().map(Rank).map(line).collect()
    }
}

#[cfg(test)]
mod tests;
