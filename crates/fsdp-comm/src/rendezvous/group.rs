//! A group of ranks.

use std::sync::Arc;

use fsdp_core::Rank;

use super::Position;

/// Ranks that call collectives together.
#[derive(Clone, Debug)]
pub struct Group {
    /// Origin of the group, the same on all ranks: the number of a group of the whole world, then (position, color) for
    /// every split.
    pub path: Vec<u64>,
    /// Name for messages.
    pub name: String,
    /// Its ranks, in order.
    pub members: Arc<[Rank]>,
}

impl Group {
    /// Creates group number `number` of the whole world.
    pub fn root(number: u64, name: &str, members: &Arc<[Rank]>) -> Self {
        Self { path: vec![number], name: name.to_owned(), members: members.clone() }
    }

    /// The members that gave `color` in the split at `position`; `colors` are the colors of all members.
    #[must_use]
    pub fn split(&self, position: Position, colors: &[usize], color: usize) -> Self {
        let same = self.members.iter().zip(colors).filter(|&(_, &theirs)| theirs == color);
        let members = same.map(|(&member, _)| member).collect();
        let path = self.path.iter().copied().chain([position, color as u64]).collect();
        Self { path, name: format!("{}/{color}", self.name), members }
    }
}
