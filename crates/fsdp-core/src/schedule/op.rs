//! Operations: what each does, and which buffers it touches.

use super::{BufferId, OpId};
use crate::comm::{Purpose, ReduceOp};
use crate::model::BlockId;
use crate::program::ForwardMode;
use crate::rank::Queue;
use crate::wrap::UnitId;

/// Number of a micro-batch on a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Round(pub usize);

/// Number of a phase of the update rule's statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Phase(pub usize);

/// Where an all-gather takes a unit's parameters from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Source {
    /// The shard; the group is the whole shard axis.
    Shard,
    /// The larger part kept after forward; the group is the sub-group of `reshard_after_forward = n`.
    SubShard,
    /// A copy of the shard that was uploaded; the group is the whole shard axis.
    Staged,
}

/// What an operation does. Its operands are in [`Op::reads`] and [`Op::writes`]: here is said in which order. "Per
/// segment" is one buffer for each segment of the unit, of a gradient for each trainable one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpKind {
    /// Orders the step behind all of the step before. Reads the note of what is not finite; writes the scalars and the
    /// statistics (they start anew), and gives up the gradients of the step before.
    BeginStep,
    /// Takes the data of a micro-batch.
    BeginMicroBatch(Round),
    /// Copies a unit's shard from host memory, to be gathered from there; per segment.
    Upload(UnitId),
    /// Gathers a unit; per segment.
    AllGather {
        /// The unit.
        unit: UnitId,
        /// What is gathered.
        source: Source,
        /// Forward or backward.
        purpose: Purpose,
    },
    /// Runs a block forward. Reads, for each parameter of the block, the gathered segment that holds it.
    Forward {
        /// The block.
        block: BlockId,
        /// What it keeps for backward.
        mode: ForwardMode,
    },
    /// Runs the last block: forward and backward in one, or forward only in evaluation. Operands as of [`OpKind::Forward`]
    /// or [`OpKind::Backward`]; it writes the scalars too, last: the program keeps the losses until
    /// [`OpKind::ReduceScalars`] takes them.
    LastBlock {
        /// The block.
        block: BlockId,
        /// Whether gradients are wanted.
        backward: bool,
    },
    /// Runs a block backward. Reads as [`OpKind::Forward`]; writes, for each trainable parameter of the block, the segment
    /// of the gradient that holds its own.
    Backward(BlockId),
    /// Copies this rank's part of the gathered unit aside, for a smaller all-gather in backward; per segment.
    KeepSubShard(UnitId),
    /// Gives up the gathered unit, which it writes; per segment.
    Reshard(UnitId),
    /// Hands the unit's gradient buffers to the program, with their padding zeroed: of a parameter's gradients in this
    /// micro-batch the first overwrites, later ones add. Writes per segment.
    OpenGradient(UnitId),
    /// The unit's gradient of this micro-batch is complete: takes the buffers back, with zeros where no block wrote. Writes
    /// per segment.
    CloseGradient(UnitId),
    /// Reduces a complete gradient over the shard axis: this rank's part is written, what is read is given up; per segment.
    ReduceScatter {
        /// The unit.
        unit: UnitId,
        /// How ranks are combined.
        reduce: ReduceOp,
    },
    /// Adds a sum of gradients, which is given up, to that of earlier micro-batches; per segment.
    Add {
        /// The unit.
        unit: UnitId,
        /// Where: [`Queue::Compute`] for whole gradients, [`Queue::Reduce`] for sharded ones.
        queue: Queue,
    },
    /// Reduces the sharded gradient over the replicate axis, in place; per segment.
    AllReduceReplicas {
        /// The unit.
        unit: UnitId,
        /// How replicas are combined.
        reduce: ReduceOp,
    },
    /// Moves the total of the step to host memory, and gives up what held it on the device; per segment.
    Download(UnitId),
    /// Adds the squares of the total of the step, read per segment, to the scalars.
    SquareNorm(UnitId),
    /// Sums loss, counts, squared norm, the stop flag and the note of what is not finite over all ranks: writes the scalars
    /// and, in training, the factors that updates need.
    ReduceScalars,
    /// Lets the update rule compute this rank's part of its statistics. Operands as of [`OpKind::Update`], but that it reads
    /// the statistics of earlier phases only, and writes its own last.
    Statistics {
        /// The unit.
        unit: UnitId,
        /// The phase.
        phase: Phase,
    },
    /// Sums the statistics of a phase over the shard axis, in place.
    ReduceStatistics(Phase),
    /// Lets the update rule make this rank's rows of the directions that it must see whole. Operands as of [`OpKind::Update`],
    /// but that it reads no statistics, and writes its rows last, per segment that has some.
    Direct(UnitId),
    /// Gathers the directions of a unit over the shard axis; what is read is given up; per segment that has some.
    GatherDirections(UnitId),
    /// Updates a unit. Reads the total gradient per segment, the factors, and the statistics of all phases; writes, segment
    /// by segment, the master parameters, their copy where there is one, and each tensor of the optimizer's state, then the
    /// note of what is not finite, and, where the unit has directions, gives them up per segment and works in the scratch.
    Update(UnitId),
}

impl OpKind {
    /// The queue on which operations of this kind run.
    pub const fn queue(&self) -> Queue {
        match self {
            OpKind::AllGather { .. } | OpKind::GatherDirections(_) => Queue::Gather,
            OpKind::Upload(_) => Queue::Upload,
            OpKind::Download(_) => Queue::Download,
            OpKind::Add { queue, .. } => *queue,
            OpKind::ReduceScatter { .. }
            | OpKind::AllReduceReplicas { .. }
            | OpKind::SquareNorm(_)
            | OpKind::ReduceScalars
            | OpKind::ReduceStatistics(_) => Queue::Reduce,
            _ => Queue::Compute,
        }
    }

    /// Whether all ranks of a group meet in the operation, and it completes later than it is issued.
    pub const fn is_collective(&self) -> bool {
        matches!(
            self,
            OpKind::AllGather { .. }
                | OpKind::GatherDirections(_)
                | OpKind::ReduceScatter { .. }
                | OpKind::AllReduceReplicas { .. }
        )
    }

    /// Whether the contents of what the operation reads are given up with it.
    pub const fn gives_up_inputs(&self) -> bool {
        matches!(
            self,
            OpKind::AllGather { source: Source::SubShard | Source::Staged, .. }
                | OpKind::GatherDirections(_)
                | OpKind::ReduceScatter { .. }
                | OpKind::Add { .. }
                | OpKind::Download(_)
        )
    }

    /// The unit that the operation concerns.
    pub const fn unit(&self) -> Option<UnitId> {
        match *self {
            OpKind::Upload(unit)
            | OpKind::AllGather { unit, .. }
            | OpKind::KeepSubShard(unit)
            | OpKind::Reshard(unit)
            | OpKind::OpenGradient(unit)
            | OpKind::CloseGradient(unit)
            | OpKind::ReduceScatter { unit, .. }
            | OpKind::Add { unit, .. }
            | OpKind::AllReduceReplicas { unit, .. }
            | OpKind::Download(unit)
            | OpKind::SquareNorm(unit)
            | OpKind::Statistics { unit, .. }
            | OpKind::Direct(unit)
            | OpKind::GatherDirections(unit)
            | OpKind::Update(unit) => Some(unit),
            _ => None,
        }
    }

    /// The block that the operation runs.
    pub const fn block(&self) -> Option<BlockId> {
        match *self {
            OpKind::Forward { block, .. } | OpKind::LastBlock { block, .. } | OpKind::Backward(block) => {
                Some(block)
            }
            _ => None,
        }
    }

    /// The name used in printed schedules and traces.
    pub const fn name(&self) -> &'static str {
        match self {
            OpKind::BeginStep => "begin step",
            OpKind::BeginMicroBatch(_) => "begin micro-batch",
            OpKind::Upload(_) => "upload",
            OpKind::AllGather { .. } => "all-gather",
            OpKind::Forward { mode: ForwardMode::Recompute, .. } => "recompute",
            OpKind::Forward { .. } => "forward",
            OpKind::LastBlock { backward: true, .. } => "forward-backward",
            OpKind::LastBlock { backward: false, .. } => "forward",
            OpKind::Backward(_) => "backward",
            OpKind::KeepSubShard(_) => "keep sub-shard",
            OpKind::Reshard(_) => "reshard",
            OpKind::OpenGradient(_) => "open gradient",
            OpKind::CloseGradient(_) => "close gradient",
            OpKind::ReduceScatter { .. } => "reduce-scatter",
            OpKind::Add { .. } => "add",
            OpKind::AllReduceReplicas { .. } => "all-reduce replicas",
            OpKind::Download(_) => "download",
            OpKind::SquareNorm(_) => "square norm",
            OpKind::ReduceScalars => "all-reduce scalars",
            OpKind::Statistics { .. } => "statistics",
            OpKind::ReduceStatistics(_) => "all-reduce statistics",
            OpKind::Direct(_) => "directions",
            OpKind::GatherDirections(_) => "all-gather directions",
            OpKind::Update(_) => "update",
        }
    }
}

/// One operation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Op {
    /// What it does.
    pub kind: OpKind,
    /// The buffers whose contents it uses.
    pub reads: Vec<BufferId>,
    /// The buffers that it changes, fills or gives up.
    pub writes: Vec<BufferId>,
    /// Operations of other queues that must be complete before.
    pub waits: Vec<OpId>,
    /// Earlier collectives whose result it uses, and which queue order or the waits put before it already: the
    /// host hands their buffers over here.
    pub joins: Vec<OpId>,
}

/// One use of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Access {
    /// The buffer.
    pub buffer: BufferId,
    /// Whether it is changed or given up, rather than only read.
    pub write: bool,
}

impl Op {
    /// What it touches.
    pub fn accesses(&self) -> impl Iterator<Item = Access> + '_ {
        let gives_up = self.kind.gives_up_inputs();
        let reads = self.reads.iter().map(move |&buffer| Access { buffer, write: gives_up });
        reads.chain(self.writes.iter().map(|&buffer| Access { buffer, write: true }))
    }
}
