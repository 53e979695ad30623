//! A group of ranks, as all its members know it.

use std::sync::Arc;

use fsdp_core::Rank;

use super::Position;

/// Ranks that call collectives together.
#[derive(Clone, Debug)]
pub struct Group {
    /// Where it comes from: which group of the whole world, then (position, color) of every split. The same on all ranks.
    pub path: Vec<u64>,
    /// For messages.
    pub name: String,
    /// Its ranks, in order.
    pub members: Arc<[Rank]>,
}

impl Group {
    /// Group number `number` of the whole world.
    pub fn root(number: u64, name: &str, members: &Arc<[Rank]>) -> Self {
        Self { path: vec![number], name: name.to_owned(), members: members.clone() }
    }

    /// Those that gave `color` in the split at `position`, where `colors` are what all members gave.
    #[must_use]
    pub fn split(&self, position: Position, colors: &[usize], color: usize) -> Self {
        let same = self.members.iter().zip(colors).filter(|&(_, &theirs)| theirs == color);
        let members = same.map(|(&member, _)| member).collect();
        let path = self.path.iter().copied().chain([position, color as u64]).collect();
        Self { path, name: format!("{}/{color}", self.name), members }
    }
}
