//! Ranks, queues and the device mesh.
//!
//! A mesh has two axes, in row-major order: `replicate` (outermost) and `shard` (innermost). Rank
//! `replica * shard_size + shard` is one worker; plain FSDP is a mesh with one replica, HSDP has more.

use std::fmt;

use crate::error::Error;

/// A worker's number in the world, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub usize);

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

/// An ordered stream of work on one rank. Work on one queue runs in order; work on different queues is ordered only
/// by explicit waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Queue {
    /// Forward, backward and updates.
    Compute,
    /// All-gathers of parameters.
    Gather,
    /// Reduce-scatters, accumulation of sharded gradients, their norms, and all-reduces.
    Reduce,
    /// Copies from the host to the device.
    Upload,
    /// Copies from the device to the host.
    Download,
}

impl Queue {
    /// All queues, in report order.
    pub const ALL: [Queue; 5] =
        [Queue::Compute, Queue::Gather, Queue::Reduce, Queue::Upload, Queue::Download];

    /// The name used in printed schedules and traces.
    pub const fn name(self) -> &'static str {
        match self {
            Queue::Compute => "compute",
            Queue::Gather => "gather",
            Queue::Reduce => "reduce",
            Queue::Upload => "upload",
            Queue::Download => "download",
        }
    }
}

impl fmt::Display for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The arrangement of ranks: `replicas` groups of `shards` ranks; parameters are sharded inside a group and
/// replicated between groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mesh {
    replicas: usize,
    shards: usize,
}

impl Mesh {
    /// Creates a mesh of `replicas * shards` ranks.
    ///
    /// # Errors
    /// [`Error::Mesh`] when either axis is zero.
    pub fn new(replicas: usize, shards: usize) -> Result<Self, Error> {
        if replicas == 0 || shards == 0 {
            return Err(Error::Mesh { replicas, world: replicas * shards });
        }
        Ok(Self { replicas, shards })
    }

    /// Arranges `world` ranks in `replicas` replicas.
    ///
    /// # Errors
    /// [`Error::Mesh`] when `replicas` is zero or does not divide `world`, or `world` is zero.
    pub fn of_world(world: usize, replicas: usize) -> Result<Self, Error> {
        if replicas == 0 || world == 0 || !world.is_multiple_of(replicas) {
            return Err(Error::Mesh { replicas, world });
        }
        Self::new(replicas, world / replicas)
    }

    /// Size of the replicate axis, R.
    pub const fn replicas(self) -> usize {
        self.replicas
    }

    /// Size of the shard axis, S.
    pub const fn shards(self) -> usize {
        self.shards
    }

    /// Number of ranks, W = R * S.
    pub const fn world(self) -> usize {
        self.replicas * self.shards
    }

    /// Index of `rank` on the replicate axis.
    pub const fn replica_of(self, rank: Rank) -> usize {
        rank.0 / self.shards
    }

    /// Index of `rank` on the shard axis.
    pub const fn shard_of(self, rank: Rank) -> usize {
        rank.0 % self.shards
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {} (replicate x shard)", self.replicas, self.shards)
    }
}
