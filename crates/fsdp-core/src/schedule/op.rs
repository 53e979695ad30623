//! Operations and the buffers they access.

use super::BufferId;
use crate::collective::{Purpose, ReduceOp};
use crate::mesh::Group;
use crate::model::BlockId;
use crate::program::{BlockCall, Round};
use crate::rank::Queue;
use crate::wrap::UnitId;

/// Index of an operation in [`Schedule::ops`](super::Schedule::ops).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub usize);

/// Number of a phase of the update rule's statistics, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Phase(pub usize);

/// The buffers from which an all-gather reads a unit's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Source {
    /// The shard.
    Shard,
    /// The larger part kept after forward (`reshard_after_forward = n`).
    SubShard,
    /// An uploaded copy of the shard.
    Staged,
}

/// The action of an operation. Its operands are in [`Op::reads`] and [`Op::writes`], in the order documented here. "Per
/// segment" means one buffer for each segment of the unit; for gradients, one for each trainable segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpKind {
    /// Orders the step after all of the previous step. Reads the non-finite flag; writes the scalars and the statistics
    /// (both are reset), and gives up the gradients of the previous step.
    BeginStep,
    /// Loads the data of a micro-batch.
    BeginMicroBatch(Round),
    /// Copies a unit's shard from host memory to the device, to be gathered there; per segment.
    Upload(UnitId),
    /// Gathers a unit; per segment.
    AllGather {
        /// The unit.
        unit: UnitId,
        /// The buffers that are gathered.
        source: Source,
        /// The ranks that hold the parts.
        group: Group,
        /// Forward or backward.
        purpose: Purpose,
    },
    /// Runs a block. Reads, for each parameter that it calls ([`Layout::called`](crate::layout::Layout::called)), the gathered
    /// segment that contains it. If the call computes gradients, writes, leaf by leaf, for each of these that is trainable and
    /// has such a leaf the segment that contains its gradient. The call of the last block then writes the scalars: the program
    /// keeps the losses until [`OpKind::ReduceScalars`] takes them.
    Call(BlockCall),
    /// Copies this rank's part of the gathered unit, for a smaller all-gather in backward; per segment.
    KeepSubShard {
        /// The unit.
        unit: UnitId,
        /// The ranks that keep the unit together.
        group: Group,
    },
    /// Gives up the gathered unit, which counts as a write; per segment.
    Reshard(UnitId),
    /// Hands the unit's gradient buffers to the program, with their padding zeroed. The first gradient of a parameter
    /// in this micro-batch overwrites, later ones add. Writes leaf by leaf (a chunk of a sample, or for experts one of each rank
    /// of the expert axis), per segment.
    OpenGradient(UnitId),
    /// Marks the unit's gradient of this micro-batch as complete: takes the buffers back, with zeros where no block
    /// wrote. Writes leaf by leaf, per segment.
    CloseGradient(UnitId),
    /// Reduces a complete gradient: writes this rank's part and gives up what it reads; per segment.
    ReduceScatter {
        /// The unit.
        unit: UnitId,
        /// How ranks are combined.
        reduce: ReduceOp,
        /// The ranks that each receive a part.
        group: Group,
    },
    /// Adds a sum of gradients, which is given up, to the sum of earlier chunks or micro-batches; per segment.
    Add {
        /// The unit.
        unit: UnitId,
        /// The queue: [`Queue::Compute`] for unsharded gradients, [`Queue::Reduce`] for sharded ones.
        queue: Queue,
    },
    /// Reduces the sharded gradient in place; per segment.
    AllReduce {
        /// The unit.
        unit: UnitId,
        /// How ranks are combined.
        reduce: ReduceOp,
        /// The ranks whose gradients are combined.
        group: Group,
    },
    /// Moves the total gradient of the step to host memory, and gives up its device buffers; per segment.
    Download(UnitId),
    /// Adds the squares of the total gradient of the step, read per segment, to the scalars.
    SquareNorm(UnitId),
    /// Sums loss, counts, squared norm, stop flag and non-finite flag over all ranks: writes the scalars and, in
    /// training, the factors that updates need.
    ReduceScalars,
    /// Lets the update rule compute this rank's part of its statistics. Operands as of [`OpKind::Update`], except that
    /// it reads only the statistics of earlier phases, and writes its own last.
    Statistics {
        /// The unit.
        unit: UnitId,
        /// The phase.
        phase: Phase,
    },
    /// Sums the statistics of a phase over the shard axis, in place.
    ReduceStatistics(Phase),
    /// Lets the update rule compute this rank's rows of the directions. Operands as of [`OpKind::Update`], except that
    /// it reads no statistics, and writes its rows last, one buffer per segment with directions.
    Direct(UnitId),
    /// All-gathers the directions of a unit, giving up what it reads; per segment with directions.
    GatherDirections {
        /// The unit.
        unit: UnitId,
        /// The ranks that hold the parts.
        group: Group,
    },
    /// Updates a unit. Reads the total gradient per segment, the factors, and the statistics of all phases. Writes,
    /// segment by segment, the master parameters, their low-precision copy if any, and each tensor of optimizer state;
    /// then the non-finite flag. If the unit has directions, it also gives them up per segment and works in the
    /// scratch.
    Update(UnitId),
}

impl OpKind {
    /// The queue on which operations of this kind run.
    pub const fn queue(&self) -> Queue {
        match self {
            OpKind::AllGather { .. } | OpKind::GatherDirections { .. } => Queue::Gather,
            OpKind::Upload(_) => Queue::Upload,
            OpKind::Download(_) => Queue::Download,
            OpKind::Add { queue, .. } => *queue,
            OpKind::ReduceScatter { .. }
            | OpKind::AllReduce { .. }
            | OpKind::SquareNorm(_)
            | OpKind::ReduceScalars
            | OpKind::ReduceStatistics(_) => Queue::Reduce,
            _ => Queue::Compute,
        }
    }

    /// Whether the operation is a collective that completes after it is issued.
    pub const fn is_collective(&self) -> bool {
        matches!(
            self,
            OpKind::AllGather { .. }
                | OpKind::GatherDirections { .. }
                | OpKind::ReduceScatter { .. }
                | OpKind::AllReduce { .. }
        )
    }

    /// The ranks that a collective runs over; `None` for other operations.
    pub const fn group(&self) -> Option<Group> {
        match *self {
            OpKind::AllGather { group, .. }
            | OpKind::ReduceScatter { group, .. }
            | OpKind::AllReduce { group, .. }
            | OpKind::GatherDirections { group, .. } => Some(group),
            OpKind::ReduceStatistics(_) => Some(Group::SHARDS),
            OpKind::ReduceScalars => Some(Group::WORLD),
            _ => None,
        }
    }

    /// Whether the operation gives up the contents of the buffers it reads.
    pub const fn gives_up_inputs(&self) -> bool {
        matches!(
            self,
            OpKind::AllGather { source: Source::SubShard | Source::Staged, .. }
                | OpKind::GatherDirections { .. }
                | OpKind::ReduceScatter { .. }
                | OpKind::Add { .. }
                | OpKind::Download(_)
        )
    }

    /// The unit that the operation works on; `None` if it works on none.
    pub const fn unit(&self) -> Option<UnitId> {
        match *self {
            OpKind::Upload(unit)
            | OpKind::AllGather { unit, .. }
            | OpKind::KeepSubShard { unit, .. }
            | OpKind::Reshard(unit)
            | OpKind::OpenGradient(unit)
            | OpKind::CloseGradient(unit)
            | OpKind::ReduceScatter { unit, .. }
            | OpKind::Add { unit, .. }
            | OpKind::AllReduce { unit, .. }
            | OpKind::Download(unit)
            | OpKind::SquareNorm(unit)
            | OpKind::Statistics { unit, .. }
            | OpKind::Direct(unit)
            | OpKind::GatherDirections { unit, .. }
            | OpKind::Update(unit) => Some(unit),
            _ => None,
        }
    }

    /// The call of a block; `None` for other operations.
    pub const fn call(&self) -> Option<BlockCall> {
        match *self {
            OpKind::Call(call) => Some(call),
            _ => None,
        }
    }

    /// The block that the operation runs; `None` if it runs none.
    pub fn block(&self) -> Option<BlockId> {
        self.call().map(BlockCall::block)
    }

    /// The name used in printed schedules and traces.
    pub const fn name(&self) -> &'static str {
        match self {
            OpKind::BeginStep => "begin step",
            OpKind::BeginMicroBatch(_) => "begin micro-batch",
            OpKind::Upload(_) => "upload",
            OpKind::AllGather { .. } => "all-gather",
            OpKind::Call(call) => call.name(),
            OpKind::KeepSubShard { .. } => "keep sub-shard",
            OpKind::Reshard(_) => "reshard",
            OpKind::OpenGradient(_) => "open gradient",
            OpKind::CloseGradient(_) => "close gradient",
            OpKind::ReduceScatter { .. } => "reduce-scatter",
            OpKind::Add { .. } => "add",
            OpKind::AllReduce { .. } => "all-reduce",
            OpKind::Download(_) => "download",
            OpKind::SquareNorm(_) => "square norm",
            OpKind::ReduceScalars => "all-reduce scalars",
            OpKind::Statistics { .. } => "statistics",
            OpKind::ReduceStatistics(_) => "all-reduce statistics",
            OpKind::Direct(_) => "directions",
            OpKind::GatherDirections { .. } => "all-gather directions",
            OpKind::Update(_) => "update",
        }
    }
}

/// One operation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Op {
    /// The action.
    pub kind: OpKind,
    /// The buffers that it reads.
    pub reads: Vec<BufferId>,
    /// The buffers that it changes, fills or gives up.
    pub writes: Vec<BufferId>,
    /// Operations on other queues that must be complete first.
    pub waits: Vec<OpId>,
    /// Earlier collectives whose results it uses, and which queue order or the waits already order before it: the host
    /// takes over their buffers here.
    pub joins: Vec<OpId>,
}

/// One access to a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Access {
    /// The buffer.
    pub buffer: BufferId,
    /// Whether the buffer is changed or given up, rather than only read.
    pub write: bool,
}

impl Op {
    /// All buffer accesses of the operation.
    pub fn accesses(&self) -> impl Iterator<Item = Access> + '_ {
        let gives_up = self.kind.gives_up_inputs();
        let reads = self.reads.iter().map(move |&buffer| Access { buffer, write: gives_up });
        reads.chain(self.writes.iter().map(|&buffer| Access { buffer, write: true }))
    }
}
