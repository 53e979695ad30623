//! Meetings: who has arrived in which collective, and who waits for whom.
//!
//! Plain data without locks, threads or buffers; [`Board`](crate::board::Board) keeps it behind its lock.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use fsdp_core::Rank;
use fsdp_core::comm::{CommError, Fingerprint, RankStatus};

use crate::failure::Failure;

/// Names a collective: the group, and how many this group issued before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct MeetingId {
    pub(crate) group: usize,
    pub(crate) sequence: u64,
}

/// What a rank is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Doing {
    /// It could run, but all cores are taken.
    Ready,
    /// It runs.
    Running,
    /// It waits for the end of a collective.
    Waiting(MeetingId),
    /// An injected fault keeps it from this call.
    Never(Fingerprint),
    /// It returned or panicked.
    Ended,
}

/// One rank's entry into a meeting.
#[derive(Clone, Debug)]
pub(crate) struct Arrival {
    /// The meeting.
    pub(crate) id: MeetingId,
    /// The ranks that meet.
    pub(crate) members: Arc<[Rank]>,
    /// Which of them arrives.
    pub(crate) index: usize,
    /// Its call.
    pub(crate) call: Fingerprint,
    /// A number for the others: the color of a split.
    pub(crate) note: usize,
}

/// One collective that some of its ranks have entered and some have not left.
#[derive(Debug)]
struct Meeting {
    call: Fingerprint,
    first: Rank,
    members: Arc<[Rank]>,
    notes: Vec<Option<usize>>,
    arrived: usize,
    done: bool,
    left: usize,
}

impl Meeting {
    fn missing(&self) -> Vec<Rank> {
        self.members
            .iter()
            .zip(&self.notes)
            .filter(|(_, note)| note.is_none())
            .map(|(&rank, _)| rank)
            .collect()
    }
}

/// The open meetings of a world.
#[derive(Debug, Default)]
pub(crate) struct Meetings {
    open: BTreeMap<MeetingId, Meeting>,
}

impl Meetings {
    /// Enters a rank; returns whether it is the last.
    pub(crate) fn arrive(&mut self, arrival: Arrival) -> Result<bool, CommError> {
        let Arrival { id, members, index, call, note } = arrival;
        let rank = members[index];
        let meeting = self.open.entry(id).or_insert_with(|| Meeting {
            call,
            first: rank,
            notes: vec![None; members.len()],
            arrived: 0,
            members,
            done: false,
            left: 0,
        });
        if meeting.call != call {
            let (peer, expected) = (meeting.first, meeting.call);
            return Err(CommError::Mismatch { rank, got: call, peer, expected });
        }
        assert!(meeting.notes[index].replace(note).is_none(), "a rank enters a collective once");
        meeting.arrived += 1;
        Ok(meeting.arrived == meeting.members.len())
    }

    /// Marks the collective as finished.
    pub(crate) fn complete(&mut self, id: MeetingId) {
        self.open.get_mut(&id).expect("a meeting is open until all ranks have left").done = true;
    }

    /// Whether the collective is finished.
    pub(crate) fn is_done(&self, id: MeetingId) -> bool {
        self.open.get(&id).is_some_and(|meeting| meeting.done)
    }

    /// The notes of all ranks of a finished collective.
    pub(crate) fn notes(&self, id: MeetingId) -> Vec<usize> {
        let meeting = self.open.get(&id).expect("a meeting is open until all ranks have left");
        meeting.notes.iter().copied().flatten().collect()
    }

    /// Lets a rank leave a finished collective.
    pub(crate) fn leave(&mut self, id: MeetingId) {
        let meeting = self.open.get_mut(&id).expect("a meeting is open until all ranks have left");
        meeting.left += 1;
        if meeting.left == meeting.members.len() {
            self.open.remove(&id);
        }
    }

    /// The failure to report when ranks wait in vain: of the collectives that are waited for, one that lacks
    /// a rank which waits nowhere itself, else any that lacks a rank. `None` when no rank is lacking.
    pub(crate) fn missing(&self, ranks: &[Doing]) -> Option<Failure> {
        let idle = |rank: &Rank| !matches!(ranks[rank.0], Doing::Waiting(_));
        // Thousands of ranks may wait in the same collective: each is looked at once.
        let mut seen = BTreeSet::new();
        let waits = ranks.iter().filter_map(|doing| match doing {
            Doing::Waiting(id) if seen.insert(*id) => {
                self.open.get(id).map(|meeting| (meeting.missing(), meeting.call))
            }
            _ => None,
        });
        let nevers = ranks.iter().enumerate().filter_map(|(rank, doing)| match doing {
            Doing::Never(call) => Some((vec![Rank(rank)], *call)),
            _ => None,
        });
        let mut lacking: Vec<_> = waits.chain(nevers).filter(|(missing, _)| !missing.is_empty()).collect();
        let chosen = lacking.iter().position(|(missing, _)| missing.iter().any(idle)).unwrap_or(0);
        if lacking.is_empty() {
            return None;
        }
        let (missing, call) = lacking.swap_remove(chosen);
        let culprit = *missing.iter().find(|rank| idle(rank)).unwrap_or(&missing[0]);
        let (missing, status) = (missing.into(), self.status(ranks));
        Some(Failure { culprit, error: CommError::Missing { missing, call, status } })
    }

    fn status(&self, ranks: &[Doing]) -> Arc<[RankStatus]> {
        let describe = |doing: &Doing| match doing {
            Doing::Ready => "waits for a core".to_owned(),
            Doing::Running => "runs outside of collectives".to_owned(),
            Doing::Ended => "has ended".to_owned(),
            Doing::Never(call) => format!("is kept from {call} by an injected fault"),
            Doing::Waiting(id) => match self.open.get(id) {
                Some(meeting) => format!("waits in {} of {} ranks", meeting.call, meeting.members.len()),
                None => "leaves a collective".to_owned(),
            },
        };
        let line = |(rank, doing)| RankStatus { rank: Rank(rank), doing: describe(doing) };
        ranks.iter().enumerate().map(line).collect()
    }
}
