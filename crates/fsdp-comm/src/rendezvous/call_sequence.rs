//! The calls that the ranks of this process make on one connection, in order.
//!
//! Groups of the same ranks may share a connection, such as an NCCL communicator. The connection sees a single sequence
//! of calls (a *line*) regardless of their groups, and would match the first call of one rank with the first call of
//! another; so the order is compared here, over all groups of a line. If the line has ranks of other processes, the
//! last calls are kept, each with a digest of all calls up to it, for comparison with theirs.

use std::collections::VecDeque;
use std::sync::Arc;

use fsdp_core::comm::Fingerprint;
use fsdp_core::{Digest, Rank};

/// The position of a call among all calls of its line.
pub type Position = u64;

/// Number of calls that are kept after all ranks of this process have entered them: those of some seconds, because the
/// calls of other processes are compared that much later.
const KEPT_MAX: usize = 4096;

/// A call that at least one rank of this process has entered.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) group: usize,
    pub(super) call: Fingerprint,
    pub(super) first: Rank,
    /// Number of ranks of this process that have entered it.
    entered: usize,
    /// Digest of all calls up to this one, with their groups.
    digest: Digest,
}

/// The different call of another rank at the same position.
#[derive(Debug)]
pub(super) struct Different {
    pub(super) peer: Rank,
    pub(super) group: usize,
    pub(super) call: Fingerprint,
}

/// A line: one connection and the order of its calls.
#[derive(Debug)]
pub(super) struct CallSequence {
    /// Indices of the members that this process holds.
    local: Vec<usize>,
    members: Arc<[Rank]>,
    /// Number of calls entered, by member; maintained only for members of this process.
    entered: Vec<Position>,
    /// Position of the first call that is kept.
    first: Position,
    kept: VecDeque<Call>,
    digest: Digest,
}

impl CallSequence {
    /// Creates a line of `members`; those at the indices `local` belong to this process.
    pub(super) fn new(members: Arc<[Rank]>, local: Vec<usize>) -> Self {
        let (entered, digest) = (vec![0; members.len()], Digest::of(&""));
        Self { local, members, entered, first: 0, kept: VecDeque::new(), digest }
    }

    /// Enters the member at `index` into its next call, a call of `group`, whose path is `path`.
    pub(super) fn enter(
        &mut self,
        index: usize,
        group: usize,
        path: &[u64],
        call: Fingerprint,
    ) -> Result<Position, Different> {
        let (position, first) = (self.entered[index], self.members[index]);
        let has_others = self.local.len() < self.members.len();
        match self.kept.get_mut((position - self.first) as usize) {
            Some(entry) if (entry.group, entry.call) != (group, call) => {
                return Err(Different { peer: entry.first, group: entry.group, call: entry.call });
            }
            Some(entry) => entry.entered += 1,
            None => {
                if has_others {
                    self.digest = self.digest.and(&(path, call));
                }
                self.kept.push_back(Call { group, call, first, entered: 1, digest: self.digest });
            }
        }
        self.entered[index] += 1;
        let kept_max = if has_others { KEPT_MAX } else { 0 };
        // The last call that a rank has entered is kept for its digest.
        let is_entered_by_all = |call: &Call| call.entered == self.local.len();
        while self.kept.len() > kept_max && self.kept.get(1).is_some_and(is_entered_by_all) {
            self.kept.pop_front();
            self.first += 1;
        }
        Ok(position)
    }

    /// The indices of the members of this process.
    pub(super) fn local(&self) -> &[usize] {
        &self.local
    }

    /// All ranks.
    pub(super) fn members(&self) -> &[Rank] {
        &self.members
    }

    /// How many calls the member at `index`, which must be of this process, has entered, and their digest.
    pub(super) fn entered(&self, index: usize) -> (Position, Digest) {
        let entered = self.entered[index];
        let last = entered.checked_sub(self.first + 1).map(|offset| self.kept[offset as usize].digest);
        (entered, last.unwrap_or_else(|| Digest::of(&"")))
    }

    /// The kept calls from a position on.
    pub(super) fn calls(&self, from: Position) -> impl Iterator<Item = (Position, &Call)> {
        (self.first..).zip(&self.kept).skip_while(move |&(position, _)| position < from)
    }

    /// Ranks of this process that have not entered the call at `position`.
    pub(super) fn missing(&self, position: Position) -> Vec<Rank> {
        let ranks = self.local.iter().filter(|&&index| self.entered[index] <= position);
        ranks.map(|&index| self.members[index]).collect()
    }

    /// Whether every call has been entered by all ranks of this process.
    #[cfg(test)]
    pub(super) fn is_settled(&self) -> bool {
        self.local.iter().all(|&index| self.entered[index] == self.first + self.kept.len() as u64)
    }

    /// Number of kept calls.
    #[cfg(test)]
    pub(super) fn kept_len(&self) -> usize {
        self.kept.len()
    }
}
