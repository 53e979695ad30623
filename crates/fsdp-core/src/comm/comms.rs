//! All communicators of a rank.

use std::collections::{BTreeMap, BTreeSet};

use super::{Comm, Traffic};
use crate::digest::Digest;
use crate::error::Error;
use crate::memory::Memory;
use crate::mesh::{Group, Mesh};
use crate::rank::{Queue, Rank};

/// The communicators of one rank: one for each group that collectives of a queue run over.
pub struct Comms<M: Memory> {
    rank: Rank,
    groups: BTreeMap<(Queue, Group), Comm<M>>,
}

impl<M: Memory> Comms<M> {
    /// Splits two communicators of the whole world into the groups of a mesh
    /// ([`Plan::groups`](crate::plan::Plan::groups)). Gathers and reductions have one each, so that they do not wait for
    /// each other. First, all ranks compare `digest`, which covers everything that must be the same on all of them.
    ///
    /// # Errors
    /// [`Error::Comm`]; [`CommError::Differs`](crate::comm::CommError::Differs) when a rank was started with other
    /// settings.
    pub fn connect(
        memory: &M,
        mut gathers: Comm<M>,
        mut reductions: Comm<M>,
        mesh: Mesh,
        groups: &BTreeSet<(Queue, Group)>,
        digest: Digest,
    ) -> Result<Self, Error> {
        gathers.agree(memory, digest)?;
        let rank = gathers.world_rank();
        let mut split = BTreeMap::new();
        for &(queue, group) in groups.iter().filter(|key| **key != (Queue::Reduce, Group::WORLD)) {
            let world = if queue == Queue::Gather { &mut gathers } else { &mut reductions };
            split.insert((queue, group), world.split(memory, mesh.group_of(rank, group))?);
        }
        split.insert((Queue::Reduce, Group::WORLD), reductions);
        Ok(Self { rank, groups: split })
    }

    /// The communicators of a rank that is alone: none.
    pub fn alone() -> Self {
        Self { rank: Rank(0), groups: BTreeMap::new() }
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The communicator of a group, if it was connected.
    pub fn find(&mut self, queue: Queue, group: Group) -> Option<&mut Comm<M>> {
        self.groups.get_mut(&(queue, group))
    }

    /// The communicator for a collective of the schedule.
    pub(crate) fn get(&mut self, queue: Queue, group: Group) -> &mut Comm<M> {
        self.find(queue, group).expect("the groups of the plan were connected")
    }

    /// The communicator of all ranks, for scalars.
    pub(crate) fn world(&mut self) -> &mut Comm<M> {
        self.get(Queue::Reduce, Group::WORLD)
    }

    /// Collectives and bytes that this rank has communicated so far.
    pub fn traffic(&self) -> Traffic {
        let mut traffic = Traffic::default();
        for comm in self.groups.values() {
            traffic += comm.traffic();
        }
        traffic
    }
}
