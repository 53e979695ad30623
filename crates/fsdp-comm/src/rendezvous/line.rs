//! The calls that the ranks of this process make on one connection, in order.
//!
//! Groups of the same ranks may share a connection, such as an NCCL communicator. It sees one line of calls, whatever group
//! they are of, and would match the first call of one rank with the first of another; so the order is compared here, over
//! all groups of a line. If ranks of other processes are on it, the last calls are kept, each with a digest of all up to
//! it, to be compared with theirs.

use std::collections::VecDeque;
use std::sync::Arc;

use fsdp_core::comm::Fingerprint;
use fsdp_core::{Digest, Rank};

/// The place of a call among all calls of its line.
pub type Position = u64;

/// Calls that are kept when all ranks of this process have entered them: those of some seconds, because what other
/// processes called is compared that much later.
const KEPT_MAX: usize = 4096;

/// A call that a rank of this process was the first to enter.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) group: usize,
    pub(super) call: Fingerprint,
    pub(super) first: Rank,
    /// How many ranks of this process have entered it.
    entered: usize,
    /// Of all calls up to this one, with their groups.
    digest: Digest,
}

/// What another rank called at this place.
#[derive(Debug)]
pub(super) struct Different {
    pub(super) peer: Rank,
    pub(super) group: usize,
    pub(super) call: Fingerprint,
}

/// One connection, as the order of its calls.
#[derive(Debug)]
pub(super) struct Line {
    /// Places of the members that this process holds.
    here: Vec<usize>,
    members: Arc<[Rank]>,
    /// By place; only of those that are here.
    entered: Vec<Position>,
    /// Position of the first call that is kept.
    first: Position,
    kept: VecDeque<Call>,
    digest: Digest,
}

impl Line {
    /// A line of these ranks, of which those at the places `here` are of this process.
    pub(super) fn new(members: Arc<[Rank]>, here: Vec<usize>) -> Self {
        let (entered, digest) = (vec![0; members.len()], Digest::of(&""));
        Self { here, members, entered, first: 0, kept: VecDeque::new(), digest }
    }

    /// Enters the rank at this place into its next call, a call of `group`, which is at `path`.
    pub(super) fn enter(
        &mut self,
        index: usize,
        group: usize,
        path: &[u64],
        call: Fingerprint,
    ) -> Result<Position, Different> {
        let (position, first) = (self.entered[index], self.members[index]);
        let has_others = self.here.len() < self.members.len();
        match self.kept.get_mut((position - self.first) as usize) {
            Some(there) if (there.group, there.call) != (group, call) => {
                return Err(Different { peer: there.first, group: there.group, call: there.call });
            }
            Some(there) => there.entered += 1,
            None => {
                if has_others {
                    self.digest = self.digest.and(&(path, call));
                }
                self.kept.push_back(Call { group, call, first, entered: 1, digest: self.digest });
            }
        }
        self.entered[index] += 1;
        let kept_max = if has_others { KEPT_MAX } else { 0 };
        // The last one that a rank has entered is kept for its digest.
        let is_entered_by_all = |call: &Call| call.entered == self.here.len();
        while self.kept.len() > kept_max && self.kept.get(1).is_some_and(is_entered_by_all) {
            self.kept.pop_front();
            self.first += 1;
        }
        Ok(position)
    }

    /// The ranks of this process, by place.
    pub(super) fn here(&self) -> &[usize] {
        &self.here
    }

    /// All ranks.
    pub(super) fn members(&self) -> &[Rank] {
        &self.members
    }

    /// How many calls the rank at this place, which is here, has entered, and the digest of them.
    pub(super) fn entered(&self, index: usize) -> (Position, Digest) {
        let entered = self.entered[index];
        let last = entered.checked_sub(self.first + 1).map(|place| self.kept[place as usize].digest);
        (entered, last.unwrap_or_else(|| Digest::of(&"")))
    }

    /// The calls that are kept, from a position on.
    pub(super) fn calls(&self, from: Position) -> impl Iterator<Item = (Position, &Call)> {
        (self.first..).zip(&self.kept).skip_while(move |&(position, _)| position < from)
    }

    /// Ranks of this process that have not entered the call at `position`.
    pub(super) fn missing(&self, position: Position) -> Vec<Rank> {
        let ranks = self.here.iter().filter(|&&index| self.entered[index] <= position);
        ranks.map(|&index| self.members[index]).collect()
    }

    /// Whether every call has been entered by all ranks of this process.
    #[cfg(test)]
    pub(super) fn is_settled(&self) -> bool {
        self.here.iter().all(|&index| self.entered[index] == self.first + self.kept.len() as u64)
    }

    /// How many calls are kept.
    #[cfg(test)]
    pub(super) fn kept_len(&self) -> usize {
        self.kept.len()
    }
}
