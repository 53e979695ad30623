//! The device mesh: ranks arranged along named axes, and the groups of ranks that collectives run over.
//!
//! Ranks are numbered in row-major order: the last axis of [`Axis::ALL`] is the innermost. Plain FSDP is a mesh with a
//! shard axis alone; HSDP has a replicate axis as well. On a context axis, ranks share micro-batches: each has a part of
//! every sample. Parameters are sharded over it, too, so that it costs no memory.
//!
//! An *expert axis* adds no ranks. It divides those that parameters are sharded over into groups of neighbors: each has a
//! block of the experts of every mixture, which is sharded over the ranks that have the same block.

use std::fmt;

use crate::error::Error;
use crate::rank::Rank;

/// A named axis of the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Axis {
    /// Ranks that hold the same shards and train on different data (HSDP).
    Replicate,
    /// Ranks that parameters are sharded over. They train on different data, too.
    Shard,
    /// Ranks that train on the same data: each has a chunk of the positions of every sample. Parameters are sharded over
    /// them as well.
    Context,
}

impl Axis {
    /// All axes, outermost first.
    pub const ALL: [Axis; 3] = [Axis::Replicate, Axis::Shard, Axis::Context];

    /// The name used in run files and printed meshes.
    pub const fn name(self) -> &'static str {
        match self {
            Axis::Replicate => "replicate",
            Axis::Shard => "shard",
            Axis::Context => "context",
        }
    }
}

/// The ranks that a collective runs over: those that differ in their coordinates on some axes only.
///
/// Ranks of a group are numbered in the order of the mesh, as if its axes were flattened into one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Group {
    /// For each axis, whether ranks of the group differ on it.
    over: [bool; Axis::ALL.len()],
    /// The part of the flattened axes.
    part: Part,
    /// If given, the ranks of a group are cut into groups of so many neighbors.
    neighbors: Option<usize>,
}

/// A part of the ranks that parameters are sharded over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Part {
    /// All of them.
    Whole,
    /// Those of the expert axis.
    Expert,
    /// Those with the same place on the expert axis.
    SameExperts,
}

impl Group {
    /// All ranks.
    pub const WORLD: Group = Group::over(&Axis::ALL);
    /// The ranks that hold all shards together: those of the shard axis and the context axis.
    pub const SHARDS: Group = Group::over(&[Axis::Shard, Axis::Context]);
    /// The ranks that hold the same shards.
    pub const REPLICATE: Group = Group::over(&[Axis::Replicate]);
    /// The ranks that share micro-batches.
    pub const CONTEXT: Group = Group::over(&[Axis::Context]);
    /// The ranks that have all experts of a mixture together.
    pub const EXPERT: Group = Group { part: Part::Expert, ..Group::SHARDS };
    /// The ranks that hold all shards of the same experts together.
    pub const EXPERT_SHARDS: Group = Group { part: Part::SameExperts, ..Group::SHARDS };

    const fn over(axes: &[Axis]) -> Self {
        let (mut over, mut at) = ([false; Axis::ALL.len()], 0);
        while at < axes.len() {
            over[axes[at] as usize] = true;
            at += 1;
        }
        Self { over, part: Part::Whole, neighbors: None }
    }

    /// Groups of `n` neighbors within each of these groups, whose size is a multiple of `n`.
    pub const fn neighbors(self, n: usize) -> Self {
        Self { neighbors: Some(n), ..self }
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(n) = self.neighbors {
            write!(f, "{n} ranks of ")?;
        }
        if self.part == Part::Expert {
            return f.write_str("expert");
        }
        // Where parameters are sharded, they are sharded over the context axis as well.
        let is_named = |axis: &Axis| {
            self.over[*axis as usize] && (*axis != Axis::Context || !self.over[Axis::Shard as usize])
        };
        let names: Vec<_> = Axis::ALL.into_iter().filter(is_named).map(Axis::name).collect();
        f.write_str(&names.join(" x "))?;
        f.write_str(if self.part == Part::SameExperts { ", same experts" } else { "" })
    }
}

/// The arrangement of ranks along named axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mesh {
    sizes: [usize; Axis::ALL.len()],
    /// Number of ranks on the expert axis.
    expert: usize,
}

impl Mesh {
    /// Creates a mesh from the sizes of its axes; those that are not named have size 1.
    ///
    /// # Errors
    /// [`Error::Mesh`] when a size is zero.
    pub fn new(axes: impl IntoIterator<Item = (Axis, usize)>) -> Result<Self, Error> {
        let mut mesh = Self { sizes: [1; Axis::ALL.len()], expert: 1 };
        for (axis, size) in axes {
            mesh.sizes[axis as usize] = size;
        }
        match mesh.world() {
            0 => Err(mesh.misfit(0)),
            _ => Ok(mesh),
        }
    }

    /// Arranges `world` ranks: the shard axis has those that the other axes leave.
    ///
    /// # Errors
    /// [`Error::Mesh`] when a size would be zero, or the product of the others does not divide `world`.
    pub fn of_world(world: usize, replicate: usize, context: usize) -> Result<Self, Error> {
        let shard = world.checked_div(replicate * context).unwrap_or(0);
        let axes = [(Axis::Replicate, replicate), (Axis::Shard, shard), (Axis::Context, context)];
        let mesh = Self::new(axes)?;
        if mesh.world() != world {
            return Err(mesh.misfit(world));
        }
        Ok(mesh)
    }

    fn misfit(self, world: usize) -> Error {
        let size = self.world();
        let why = format!("does not fit {world} ranks: the sizes of its axes multiply to {size}");
        Error::Mesh { mesh: self.to_string(), why }
    }

    /// The same mesh with `expert` ranks on the expert axis.
    ///
    /// # Errors
    /// [`Error::Mesh`] when they do not divide the ranks that parameters are sharded over.
    pub fn with_expert(self, expert: usize) -> Result<Self, Error> {
        if expert == 0 || !self.shards().is_multiple_of(expert) {
            let shards = self.shards();
            let why = format!(
                "cannot have an expert axis of {expert}, which has to divide the {shards} ranks of shard x context"
            );
            return Err(Error::Mesh { mesh: self.to_string(), why });
        }
        Ok(Self { expert, ..self })
    }

    /// Number of ranks on the expert axis.
    pub const fn expert(self) -> usize {
        self.expert
    }

    /// Number of ranks on an axis.
    pub const fn size(self, axis: Axis) -> usize {
        self.sizes[axis as usize]
    }

    /// Number of ranks.
    pub fn world(self) -> usize {
        self.sizes.iter().product()
    }

    /// Number of shards of every parameter.
    pub fn shards(self) -> usize {
        self.group_size(Group::SHARDS)
    }

    /// The number of the shard that `rank` holds.
    pub fn shard(self, rank: Rank) -> usize {
        self.index_in_group(rank, Group::SHARDS)
    }

    /// The degree of data parallelism: the number of ranks that train on different micro-batches.
    pub const fn dp_degree(self) -> usize {
        self.size(Axis::Replicate) * self.size(Axis::Shard)
    }

    /// The number of `rank` among those that train on different micro-batches.
    pub fn dp_rank(self, rank: Rank) -> usize {
        rank.0 / self.size(Axis::Context)
    }

    /// The coordinate of `rank` on an axis.
    pub fn coordinate(self, rank: Rank, axis: Axis) -> usize {
        let inner: usize = self.sizes[axis as usize + 1..].iter().product();
        rank.0 / inner % self.size(axis)
    }

    /// Number of ranks in each group.
    pub fn group_size(self, group: Group) -> usize {
        group.neighbors.unwrap_or_else(|| self.part_size(group))
    }

    /// The difference between the numbers of a rank and of the next one in its group.
    pub fn stride(self, group: Group) -> usize {
        let innermost = group.over.iter().rposition(|is_over| *is_over).unwrap_or(Axis::ALL.len() - 1);
        let inner: usize = self.sizes[innermost + 1..].iter().product();
        inner * if group.part == Part::SameExperts { self.expert } else { 1 }
    }

    /// The number of the group that `rank` is in.
    pub fn group_of(self, rank: Rank, group: Group) -> usize {
        let others = group.over.map(|is_over| !is_over);
        let (part, index) = self.part_and_index(rank, group);
        let (parts, size) = (self.flattened_size(group.over) / self.part_size(group), self.group_size(group));
        (self.flattened(rank, others) * parts + part) * (self.part_size(group) / size) + index / size
    }

    /// The number of `rank` in its group.
    pub fn index_in_group(self, rank: Rank, group: Group) -> usize {
        self.part_and_index(rank, group).1 % self.group_size(group)
    }

    /// Number of ranks in a group before it is cut into neighbors.
    fn part_size(self, group: Group) -> usize {
        let all = self.flattened_size(group.over);
        match group.part {
            Part::Whole => all,
            Part::Expert => self.expert,
            Part::SameExperts => all / self.expert,
        }
    }

    /// The part of the flattened axes that `rank` is in, and its number there.
    fn part_and_index(self, rank: Rank, group: Group) -> (usize, usize) {
        let at = self.flattened(rank, group.over);
        match group.part {
            Part::Whole => (0, at),
            Part::Expert => (at / self.expert, at % self.expert),
            Part::SameExperts => (at % self.expert, at / self.expert),
        }
    }

    fn flattened_size(self, over: [bool; Axis::ALL.len()]) -> usize {
        self.sizes.iter().zip(over).map(|(&size, is_over)| if is_over { size } else { 1 }).product()
    }

    /// The coordinate of `rank` on several axes as if they were one.
    fn flattened(self, rank: Rank, over: [bool; Axis::ALL.len()]) -> usize {
        let axes = Axis::ALL.into_iter().filter(|&axis| over[axis as usize]);
        axes.fold(0, |at, axis| at * self.size(axis) + self.coordinate(rank, axis))
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes = Axis::ALL.into_iter().filter(|&axis| axis != Axis::Context || self.size(axis) > 1);
        let (sizes, names): (Vec<_>, Vec<_>) =
            axes.map(|axis| (self.size(axis).to_string(), axis.name())).unzip();
        write!(f, "{} ({})", sizes.join(" x "), names.join(" x "))?;
        match self.expert {
            1 => Ok(()),
            expert => write!(f, " with {expert} (expert)"),
        }
    }
}

#[cfg(test)]
mod tests;
