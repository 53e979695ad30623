//! The table of all ranks: which collectives each of them has issued on each communicator, and which have ended.
//!
//! Plain data without locks, threads or clocks: [`World`](super::world::World) keeps it behind its lock and says what
//! time it is. With it, a call that differs from those of the other ranks is refused before it is issued, and a
//! time-out knows who did not come.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fsdp_core::Rank;
use fsdp_core::comm::{CommError, Fingerprint, RankStatus};

/// Which communicator, and which of its ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seat {
    pub(super) group: usize,
    pub(super) index: usize,
}

/// The place of a call among all calls of its communicator.
pub(super) type Position = u64;

/// The rank to blame, and what every call returns from now on.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) culprit: Rank,
    pub(super) error: CommError,
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
    entered: Position,
    latest: Option<Fingerprint>,
    ended: Option<Fingerprint>,
    outstanding: VecDeque<Outstanding<E>>,
    /// Since when the first of them is the first.
    since: Instant,
}

/// Calls that some ranks have entered and some have not, or whose notes some have not read.
#[derive(Debug)]
struct Meeting {
    call: Fingerprint,
    first: Rank,
    notes: Vec<Option<usize>>,
    readers_left: usize,
}

#[derive(Debug)]
struct Group<E> {
    name: String,
    members: Arc<[Rank]>,
    rows: Vec<Row<E>>,
    open: BTreeMap<Position, Meeting>,
}

impl<E> Group<E> {
    /// Ranks that have not entered the call at `position`.
    fn missing(&self, position: Position) -> Vec<Rank> {
        let rows = self.members.iter().zip(&self.rows);
        rows.filter(|(_, row)| row.entered <= position).map(|(&rank, _)| rank).collect()
    }
}

/// The first collective that a rank has not ended, and who keeps it from ending.
struct Wait {
    rank: Rank,
    call: Fingerprint,
    missing: Vec<Rank>,
    waited: Duration,
}

#[derive(Debug)]
pub(super) struct Table<E> {
    groups: Vec<Group<E>>,
    by_path: BTreeMap<Vec<u64>, usize>,
    ended: Vec<bool>,
}

impl<E> Table<E> {
    pub(super) fn new(ranks: usize) -> Self {
        Self { groups: Vec::new(), by_path: BTreeMap::new(), ended: vec![false; ranks] }
    }

    /// The seat of `rank` in the communicator at `path`, which is made by the first of its members that asks.
    pub(super) fn seat(
        &mut self,
        path: &[u64],
        name: &str,
        members: &Arc<[Rank]>,
        rank: Rank,
        now: Instant,
    ) -> Seat {
        let next = self.groups.len();
        let group = *self.by_path.entry(path.to_vec()).or_insert(next);
        if group == next {
            let row =
                |_| Row { entered: 0, latest: None, ended: None, outstanding: VecDeque::new(), since: now };
            self.groups.push(Group {
                name: name.to_owned(),
                members: members.clone(),
                rows: (0..members.len()).map(row).collect(),
                open: BTreeMap::new(),
            });
        }
        let index = members.iter().position(|&member| member == rank);
        Seat { group, index: index.expect("a rank asks for groups that it belongs to") }
    }

    /// The ranks of a communicator.
    pub(super) fn members(&self, seat: Seat) -> Arc<[Rank]> {
        self.groups[seat.group].members.clone()
    }

    /// Enters a rank into its next call, unless another rank called something else at this place. With a `note`,
    /// the notes of all ranks are kept until each of them has read them.
    pub(super) fn enter(
        &mut self,
        seat: Seat,
        call: Fingerprint,
        note: Option<usize>,
        now: Instant,
    ) -> Result<Position, CommError> {
        let group = &mut self.groups[seat.group];
        let (size, rank) = (group.members.len(), group.members[seat.index]);
        let row = &mut group.rows[seat.index];
        let position = row.entered;
        let meeting = group.open.entry(position).or_insert_with(|| Meeting {
            call,
            first: rank,
            notes: vec![None; size],
            readers_left: size,
        });
        if meeting.call != call {
            let (peer, expected) = (meeting.first, meeting.call);
            return Err(CommError::Mismatch { rank, got: call, peer, expected });
        }
        meeting.notes[seat.index] = Some(note.unwrap_or(0));
        if note.is_none() && meeting.notes.iter().all(Option::is_some) {
            group.open.remove(&position);
        }
        row.entered += 1;
        row.latest = Some(call);
        if row.outstanding.is_empty() {
            row.since = now;
        }
        row.outstanding.push_back(Outstanding { position, call, event: None });
        Ok(position)
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
        row.ended = Some(ended.expect("a call ends once").call);
        row.since = now;
    }

    /// The notes of all ranks once all have entered, for each rank to read once.
    pub(super) fn notes(&mut self, seat: Seat, position: Position) -> Option<Vec<usize>> {
        let open = &mut self.groups[seat.group].open;
        let meeting = open.get_mut(&position).expect("notes are kept until all ranks have read them");
        let notes: Vec<usize> = meeting.notes.iter().copied().collect::<Option<_>>()?;
        meeting.readers_left -= 1;
        if meeting.readers_left == 0 {
            open.remove(&position);
        }
        Some(notes)
    }

    /// Notes that a rank has ended.
    pub(super) fn end_rank(&mut self, rank: Rank) {
        self.ended[rank.0] = true;
    }

    /// Takes calls out whose event has passed, as `is_past` says for an event of a rank.
    pub(super) fn settle<X>(
        &mut self,
        now: Instant,
        mut is_past: impl FnMut(Rank, &E) -> Result<bool, X>,
    ) -> Result<(), (Rank, X)> {
        for group in &mut self.groups {
            for (&rank, row) in group.members.iter().zip(&mut group.rows) {
                while let Some(Outstanding { event: Some(event), call, .. }) = row.outstanding.front() {
                    if !is_past(rank, event).map_err(|error| (rank, error))? {
                        break;
                    }
                    row.ended = Some(*call);
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

    /// The call that a rank of a communicator is in, if it is in one.
    pub(super) fn current(&self, seat: Seat) -> Option<Fingerprint> {
        let row = &self.groups[seat.group].rows[seat.index];
        row.outstanding.front().map(|outstanding| outstanding.call).or(row.ended)
    }

    /// The failure to report when a collective can not end because a rank that it needs has ended, or when one has
    /// been outstanding for `limit`.
    pub(super) fn overdue(&self, now: Instant, limit: Duration) -> Option<Failure> {
        let waits = self.waits(now);
        for wait in &waits {
            // The others may still come.
            let missing: Vec<Rank> = wait.missing.iter().copied().filter(|rank| self.ended[rank.0]).collect();
            if let Some(&culprit) = missing.first() {
                let (call, status) = (wait.call, self.status());
                return Some(Failure { culprit, error: CommError::Missing { missing, call, status } });
            }
        }
        let late = waits.iter().find(|wait| wait.waited >= limit)?;
        // Who is waited for may wait itself: for somebody that waits for nobody.
        let waits_for_another =
            |rank: &Rank| waits.iter().any(|wait| wait.rank == *rank && !wait.missing.is_empty());
        let is_root = |wait: &&Wait| wait.missing.iter().any(|rank| !waits_for_another(rank));
        let Wait { rank, call, missing, .. } = waits.iter().find(is_root).unwrap_or(late);
        let culprit = *missing.iter().find(|rank| !waits_for_another(rank)).unwrap_or(rank);
        let (seconds, missing, status) = (limit.as_secs(), missing.clone(), self.status());
        Some(Failure {
            culprit,
            error: CommError::TimedOut { rank: *rank, call: *call, seconds, missing, status },
        })
    }

    fn waits(&self, now: Instant) -> Vec<Wait> {
        let mut waits = Vec::new();
        for group in &self.groups {
            for (&rank, row) in group.members.iter().zip(&group.rows) {
                if let Some(front) = row.outstanding.front() {
                    let missing = group.missing(front.position);
                    let waited = now.saturating_duration_since(row.since);
                    waits.push(Wait { rank, call: front.call, missing, waited });
                }
            }
        }
        waits
    }

    /// What every rank has issued last and ended last, on every communicator.
    pub(super) fn status(&self) -> Vec<RankStatus> {
        let line = |(rank, ended): (usize, &bool)| {
            let rank = Rank(rank);
            let of_group = |group: &Group<E>| {
                let index = group.members.iter().position(|&member| member == rank)?;
                let row = &group.rows[index];
                let latest = row.latest?;
                Some(match row.ended {
                    Some(ended) if ended == latest => format!("{}: ended {ended}", group.name),
                    Some(ended) => format!("{}: issued {latest}, ended {ended}", group.name),
                    None => format!("{}: issued {latest}, ended none", group.name),
                })
            };
            let mut parts: Vec<String> = self.groups.iter().filter_map(of_group).collect();
            if *ended {
                parts.insert(0, "has returned".to_owned());
            } else if parts.is_empty() {
                parts.push("has issued nothing".to_owned());
            }
            RankStatus { rank, doing: parts.join("; ") }
        };
        self.ended.iter().enumerate().map(line).collect()
    }
}

#[cfg(test)]
mod tests;
