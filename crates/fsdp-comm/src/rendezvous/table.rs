//! The table of the ranks of this process: which collectives each of them has entered in each group, and which have
//! ended.
//!
//! Callers pass the time. With the table, a call that differs from those of other ranks is rejected before it is
//! issued, and a timeout can name the missing ranks. A group is a rank's view and has its own calls; a *line*
//! ([`CallSequence`]) is the underlying connection, which groups of the same ranks may share.

mod report;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fsdp_core::Rank;
use fsdp_core::comm::{CommError, Fingerprint, RankStatus};

use super::call_sequence::{CallSequence, Different, Position};
use super::waits::{self, Wait};
use super::{Failure, Group};
use crate::link::place;

/// A rank's seat: a group of a table, and a member of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat {
    /// Number of the group.
    pub group: usize,
    /// Index of the rank among its members.
    pub index: usize,
}

/// A collective that a rank has entered and not yet finished.
#[derive(Debug)]
struct Outstanding<E> {
    position: Position,
    call: Fingerprint,
    /// The point in the device's queue after the collective; `None` until the call is issued to the device.
    event: Option<E>,
}

/// One rank of a group.
#[derive(Debug)]
struct RankProgress<E> {
    latest: Option<Fingerprint>,
    ended: Option<(Position, Fingerprint)>,
    outstanding: VecDeque<Outstanding<E>>,
    /// Since when the first of them has been the first.
    since: Instant,
}

#[derive(Debug)]
struct Rows<E> {
    group: Group,
    rows: Vec<RankProgress<E>>,
    /// Index of the line.
    line: usize,
}

impl<E> Rows<E> {
    fn ranks(&self) -> impl Iterator<Item = (Rank, &RankProgress<E>)> {
        self.group.members.iter().copied().zip(&self.rows)
    }
}

/// The calls of the ranks of this process. `E` is an event that tells when an issued call has ended.
#[derive(Debug)]
pub struct Table<E> {
    groups: Vec<Rows<E>>,
    lines: Vec<CallSequence>,
    by_path: BTreeMap<Vec<u64>, usize>,
    /// The ranks of this process, and those of them that have returned.
    local: Range<usize>,
    ended: BTreeSet<Rank>,
}

impl<E> Table<E> {
    /// Creates a table of the ranks `local`.
    pub fn new(local: Range<usize>) -> Self {
        let (groups, lines, by_path) = Default::default();
        Self { groups, lines, by_path, local, ended: BTreeSet::new() }
    }

    /// Returns the seat of `rank` in a group. The first member that asks adds the group to the table, with its own
    /// connection or with the connection of the group of `shares`, which has the same ranks.
    ///
    /// # Panics
    /// Panics if the rank is not a member of the group.
    pub fn seat(&mut self, group: &Group, rank: Rank, shares: Option<Seat>, now: Instant) -> Seat {
        let members = &group.members;
        let number = *self.by_path.entry(group.path.clone()).or_insert(self.groups.len());
        if number == self.groups.len() {
            let line = shares.map_or(self.lines.len(), |other| self.groups[other.group].line);
            if line == self.lines.len() {
                let is_local = |&index: &usize| self.local.contains(&members[index].0);
                self.lines
                    .push(CallSequence::new(members.clone(), (0..members.len()).filter(is_local).collect()));
            }
            let row =
                |_| RankProgress { latest: None, ended: None, outstanding: VecDeque::new(), since: now };
            let rows = (0..members.len()).map(row).collect();
            self.groups.push(Rows { group: group.clone(), rows, line });
        }
        Seat { group: number, index: place(rank, members) }
    }

    /// The ranks of a group.
    pub fn members(&self, seat: Seat) -> Arc<[Rank]> {
        self.groups[seat.group].group.members.clone()
    }

    /// The rank of a seat.
    pub fn rank(&self, seat: Seat) -> Rank {
        self.groups[seat.group].group.members[seat.index]
    }

    /// Enters a rank into its next call.
    ///
    /// # Errors
    /// [`CommError::Mismatch`] or [`CommError::Order`] if another rank made a different call at this position of the
    /// connection.
    pub fn enter(&mut self, seat: Seat, call: Fingerprint, now: Instant) -> Result<Position, CommError> {
        let Rows { group, line, .. } = &self.groups[seat.group];
        let position = self.lines[*line]
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
        let (rank, peer) = (self.rank(seat), different.peer);
        if different.group == seat.group {
            return CommError::Mismatch { rank, got: call, peer, expected: different.call };
        }
        let name = |group: usize| self.groups[group].group.name.clone();
        CommError::Order { rank, call, group: name(seat.group), peer, peer_group: name(different.group) }
    }

    /// Records that a call was issued to the device, and that it ends at `event`.
    ///
    /// # Panics
    /// Panics if the call is not outstanding.
    pub fn issued(&mut self, seat: Seat, position: Position, event: E) {
        let row = &mut self.groups[seat.group].rows[seat.index];
        let found = row.outstanding.iter_mut().find(|outstanding| outstanding.position == position);
        found.expect("a call is outstanding until it has ended").event = Some(event);
    }

    /// Records the end of a call that does not run on a device.
    ///
    /// # Panics
    /// Panics if the call is not outstanding.
    pub fn end_call(&mut self, seat: Seat, position: Position, now: Instant) {
        let row = &mut self.groups[seat.group].rows[seat.index];
        let found = row.outstanding.iter().position(|outstanding| outstanding.position == position);
        let ended = found.and_then(|index| row.outstanding.remove(index));
        row.ended = Some((position, ended.expect("a call ends once").call));
        row.since = now;
    }

    /// Records that a rank has ended.
    pub fn end_rank(&mut self, rank: Rank) {
        self.ended.insert(rank);
    }

    /// Removes the calls whose event has passed, according to `is_past`.
    ///
    /// # Errors
    /// The first error of `is_past`, with its rank.
    pub fn settle<X>(
        &mut self,
        now: Instant,
        mut is_past: impl FnMut(Rank, &E) -> Result<bool, X>,
    ) -> Result<(), (Rank, X)> {
        for Rows { group, rows, .. } in &mut self.groups {
            for (&rank, row) in group.members.iter().zip(rows) {
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

    /// Whether no rank has an outstanding call.
    pub fn is_idle(&self) -> bool {
        self.groups.iter().flat_map(|group| &group.rows).all(|row| row.outstanding.is_empty())
    }

    /// The call that a rank is in on the connection of `seat`, or else the last one that has ended there.
    pub fn current(&self, seat: Seat) -> Option<Fingerprint> {
        let line = self.groups[seat.group].line;
        let rows =
            || self.groups.iter().filter(|group| group.line == line).map(|group| &group.rows[seat.index]);
        let first = rows().filter_map(|row| row.outstanding.front()).min_by_key(|first| first.position);
        let last = || rows().filter_map(|row| row.ended).max_by_key(|&(position, _)| position);
        first.map(|first| first.call).or_else(|| last().map(|(_, call)| call))
    }

    /// The failure to report if a collective cannot end because a rank that it needs has ended, or if one has been
    /// outstanding for `limit`. Considers only the ranks of this process.
    pub fn overdue(&self, now: Instant, limit: Duration) -> Option<Failure> {
        let (waits, status) = (self.waits(now), || self.status());
        waits::deserted(&waits, |rank| self.ended.contains(&rank), &status)
            .or_else(|| waits::overdue(&waits, limit, &status))
    }

    /// A rank and the call in which it has waited for at least `limit`, if any.
    pub fn waiting(&self, now: Instant, limit: Duration) -> Option<(Rank, Fingerprint)> {
        let waits = self.waits(now);
        waits.iter().find(|wait| wait.waited >= limit).map(|wait| (wait.rank, wait.call))
    }

    fn waits(&self, now: Instant) -> Vec<Wait> {
        let mut waits = Vec::new();
        for rows in &self.groups {
            for (rank, row) in rows.ranks() {
                if let Some(front) = row.outstanding.front() {
                    let missing = self.lines[rows.line].missing(front.position);
                    let waited = now.saturating_duration_since(row.since);
                    waits.push(Wait { rank, call: front.call, missing, waited });
                }
            }
        }
        waits
    }

    /// The wait of a rank that has waited for `waited` for the end of one of its calls.
    ///
    /// # Panics
    /// Panics if the call is not outstanding.
    pub fn wait(&self, seat: Seat, position: Position, waited: Duration) -> Wait {
        let Rows { rows, line, .. } = &self.groups[seat.group];
        let mut outstanding = rows[seat.index].outstanding.iter();
        let found = outstanding.find(|outstanding| outstanding.position == position);
        let call = found.expect("a call is outstanding until it has ended").call;
        Wait { rank: self.rank(seat), call, missing: self.lines[*line].missing(position), waited }
    }

    /// The last call that every rank of this process has issued, and the last that has ended, in every group.
    pub(super) fn status(&self) -> Arc<[RankStatus]> {
        let line = |rank: Rank| {
            let of_group = |Rows { group, rows, .. }: &Rows<E>| {
                let index = group.members.iter().position(|&member| member == rank)?;
                let row = &rows[index];
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
        self.local.clone().map(Rank).map(line).collect()
    }
}

#[cfg(test)]
mod tests;
