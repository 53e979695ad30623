//! The calls that all ranks make on one NCCL communicator, in order.
//!
//! Groups of the same ranks may share an NCCL communicator. NCCL then sees one line of calls, whatever group they are
//! of, and would match the first call of one rank with the first of another; so the order is compared here, over all
//! groups of a line.

use std::collections::BTreeMap;
use std::sync::Arc;

use fsdp_core::Rank;
use fsdp_core::comm::Fingerprint;

/// The place of a call among all calls of its line.
pub(in crate::nccl) type Position = u64;

/// Calls that some ranks have entered and some have not, or whose notes some have not read.
#[derive(Debug)]
struct Meeting {
    group: usize,
    call: Fingerprint,
    first: Rank,
    notes: Vec<Option<usize>>,
    readers_left: usize,
}

/// What another rank called at this place.
#[derive(Debug)]
pub(super) struct Different {
    pub(super) peer: Rank,
    pub(super) group: usize,
    pub(super) call: Fingerprint,
}

/// One NCCL communicator, as the order of its calls.
#[derive(Debug)]
pub(super) struct Line {
    members: Arc<[Rank]>,
    entered: Vec<Position>,
    open: BTreeMap<Position, Meeting>,
}

impl Line {
    pub(super) fn new(members: Arc<[Rank]>) -> Self {
        Self { entered: vec![0; members.len()], members, open: BTreeMap::new() }
    }

    /// Enters the rank with this index into its next call, a call of `group`. With a `note`, the notes of all ranks are
    /// kept until each of them has read them.
    pub(super) fn enter(
        &mut self,
        index: usize,
        group: usize,
        call: Fingerprint,
        note: Option<usize>,
    ) -> Result<Position, Different> {
        let (size, first) = (self.members.len(), self.members[index]);
        let position = self.entered[index];
        let meeting = self.open.entry(position).or_insert_with(|| Meeting {
            group,
            call,
            first,
            notes: vec![None; size],
            readers_left: size,
        });
        if (meeting.group, meeting.call) != (group, call) {
            return Err(Different { peer: meeting.first, group: meeting.group, call: meeting.call });
        }
        meeting.notes[index] = Some(note.unwrap_or(0));
        if note.is_none() && meeting.notes.iter().all(Option::is_some) {
            self.open.remove(&position);
        }
        self.entered[index] += 1;
        Ok(position)
    }

    /// The notes of all ranks once all have entered, for each rank to read once.
    pub(super) fn notes(&mut self, position: Position) -> Option<Vec<usize>> {
        let meeting = self.open.get_mut(&position).expect("notes are kept until all ranks have read them");
        let notes: Vec<usize> = meeting.notes.iter().copied().collect::<Option<_>>()?;
        meeting.readers_left -= 1;
        if meeting.readers_left == 0 {
            self.open.remove(&position);
        }
        Some(notes)
    }

    /// Ranks that have not entered the call at `position`.
    pub(super) fn missing(&self, position: Position) -> Vec<Rank> {
        let ranks = self.members.iter().zip(&self.entered);
        ranks.filter(|&(_, &entered)| entered <= position).map(|(&rank, _)| rank).collect()
    }

    /// Whether every call has been entered by all ranks, and every note read.
    #[cfg(test)]
    pub(super) fn is_settled(&self) -> bool {
        self.open.is_empty()
    }
}
