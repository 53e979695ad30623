//! The schedule: one training step (or evaluation) as data.
//!
//! A schedule is a list of operations in **program order**. Each operation belongs to a queue; operations of
//! one queue run in program order, operations of different queues are ordered only by declared waits. The
//! same list is executed by the engine, proven safe by the checker, measured by the ledger and printed.
//!
//! It is the same on every rank, and a pure function of (model blocks, layout, mesh, policy, rounds):
//! policies are visible only in the compiler ([`compile_step`], [`compile_evaluation`]).

mod compile;
mod display;
mod emit;
mod order;
mod policy;
mod residency;
mod tenancy;

pub use compile::{Compiler, compile_evaluation, compile_step};
pub use order::micro_batch_index;
pub use policy::{Accumulation, AccumulationOrder, Checkpointing, Offload, Policy, Reshard};
pub use tenancy::{Access, Resource, Tenancy};

use crate::comm::Purpose;
use crate::model::BlockId;
use crate::program::ForwardMode;
use crate::rank::Queue;

/// Index of an operation in [`Schedule::ops`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub usize);

/// Where an all-gather takes a unit's parameters from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Source {
    /// The shard; the group is the whole shard axis.
    Shard,
    /// The larger part kept after forward; the group is the sub-group of `reshard_after_forward = n`.
    SubShard,
    /// A copy of the shard that was uploaded into this staging slot; the group is the whole shard axis.
    Staged(usize),
}

/// What an operation does. Units, slots and phases are indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpKind {
    /// Orders the step behind the updates of the one before.
    BeginStep,
    /// Takes the data of a micro-batch.
    BeginMicroBatch {
        /// Number of the micro-batch on this rank.
        round: usize,
    },
    /// Copies a unit's shard from host memory into a staging slot, to be gathered from there.
    Upload {
        /// The unit.
        unit: usize,
        /// The staging slot.
        staging: usize,
    },
    /// Gathers a unit into an unsharded slot.
    AllGather {
        /// The unit.
        unit: usize,
        /// The slot.
        slot: usize,
        /// What is gathered.
        source: Source,
        /// Forward or backward.
        purpose: Purpose,
    },
    /// Runs a block forward.
    Forward {
        /// The block.
        block: BlockId,
        /// What it keeps for backward.
        mode: ForwardMode,
    },
    /// Runs the last block: forward and backward in one, or forward only in evaluation.
    Finish {
        /// The block.
        block: BlockId,
        /// Whether gradients are wanted.
        backward: bool,
    },
    /// Runs a block backward.
    Backward {
        /// The block.
        block: BlockId,
    },
    /// Copies this rank's part of the unsharded unit aside, for a smaller all-gather in backward.
    KeepSubShard {
        /// The unit.
        unit: usize,
    },
    /// Gives up the unsharded unit.
    Reshard {
        /// The unit.
        unit: usize,
    },
    /// Takes a gradient slot for a unit.
    OpenGradient {
        /// The unit.
        unit: usize,
        /// The slot.
        slot: usize,
    },
    /// The unit's gradient of this micro-batch is complete.
    CloseGradient {
        /// The unit.
        unit: usize,
    },
    /// Adds the closed gradient into the unit's unsharded sums; after the last micro-batch the slot
    /// holds the total.
    FoldUnsharded {
        /// The unit.
        unit: usize,
        /// Whether this was the last micro-batch.
        last: bool,
    },
    /// Reduces the closed gradient over the shard axis; this rank keeps its part, the slot is given back.
    ReduceScatter {
        /// The unit.
        unit: usize,
        /// The reduced slot that takes the part; `None`: an accumulator of the unit's own.
        slot: Option<usize>,
    },
    /// Adds what the reduce-scatter brought into the unit's sums; after the last one the total stands in the
    /// sharded gradient.
    Fold {
        /// The unit.
        unit: usize,
        /// Whether this was the last reduce-scatter of the step.
        last: bool,
    },
    /// Reduces the sharded gradient over the replicate axis.
    AllReduceReplicas {
        /// The unit.
        unit: usize,
    },
    /// Moves the total of the step to host memory, and gives up what held it on the device.
    Download {
        /// The unit.
        unit: usize,
        /// The reduced slot that holds it; `None`: an accumulator of the unit's own.
        slot: Option<usize>,
    },
    /// Adds the squares of the total of the step to the scalars, where that lies on the device.
    SquareNorm {
        /// The unit.
        unit: usize,
    },
    /// Sums loss, token count, squared norm and the stop flag over all ranks.
    ReduceScalars,
    /// Lets the update rule compute this rank's part of its statistics.
    Statistics {
        /// The unit.
        unit: usize,
        /// The phase.
        phase: usize,
    },
    /// Sums the statistics of a phase over the shard axis.
    ReduceStatistics {
        /// The phase.
        phase: usize,
    },
    /// Updates the unit's master parameters and optimizer state.
    Update {
        /// The unit.
        unit: usize,
    },
}

impl OpKind {
    /// The queue on which operations of this kind run.
    pub const fn queue(&self) -> Queue {
        match self {
            OpKind::AllGather { .. } => Queue::Gather,
            OpKind::Upload { .. } => Queue::Upload,
            OpKind::Download { .. } => Queue::Download,
            OpKind::ReduceScatter { .. }
            | OpKind::Fold { .. }
            | OpKind::AllReduceReplicas { .. }
            | OpKind::SquareNorm { .. }
            | OpKind::ReduceScalars
            | OpKind::ReduceStatistics { .. } => Queue::Reduce,
            _ => Queue::Compute,
        }
    }

    /// Whether all ranks of a group meet in the operation, and it completes later than it is issued.
    pub const fn is_collective(&self) -> bool {
        matches!(
            self,
            OpKind::AllGather { .. } | OpKind::ReduceScatter { .. } | OpKind::AllReduceReplicas { .. }
        )
    }

    /// The name used in printed schedules and traces.
    pub const fn name(&self) -> &'static str {
        match self {
            OpKind::BeginStep => "begin step",
            OpKind::BeginMicroBatch { .. } => "begin micro-batch",
            OpKind::Upload { .. } => "upload",
            OpKind::AllGather { .. } => "all-gather",
            OpKind::Forward { mode: ForwardMode::Recompute, .. } => "recompute",
            OpKind::Forward { .. } => "forward",
            OpKind::Finish { backward: true, .. } => "forward-backward",
            OpKind::Finish { backward: false, .. } => "forward",
            OpKind::Backward { .. } => "backward",
            OpKind::KeepSubShard { .. } => "keep sub-shard",
            OpKind::Reshard { .. } => "reshard",
            OpKind::OpenGradient { .. } => "open gradient",
            OpKind::CloseGradient { .. } => "close gradient",
            OpKind::FoldUnsharded { .. } => "fold unsharded",
            OpKind::ReduceScatter { .. } => "reduce-scatter",
            OpKind::Fold { .. } => "fold",
            OpKind::AllReduceReplicas { .. } => "all-reduce replicas",
            OpKind::Download { .. } => "download",
            OpKind::SquareNorm { .. } => "square norm",
            OpKind::ReduceScalars => "all-reduce scalars",
            OpKind::Statistics { .. } => "statistics",
            OpKind::ReduceStatistics { .. } => "all-reduce statistics",
            OpKind::Update { .. } => "update",
        }
    }
}

/// One operation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Op {
    /// What it does.
    pub kind: OpKind,
    /// Operations of other queues that must be complete before.
    pub waits: Vec<OpId>,
    /// Earlier collectives whose result it uses, and which queue order or the waits put before it already: the
    /// host hands their buffers over here.
    pub joins: Vec<OpId>,
}

/// What a section of a schedule is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SectionKind {
    /// Before the first micro-batch.
    Prologue,
    /// One micro-batch.
    MicroBatch(usize),
    /// After the last micro-batch: norm, update.
    Epilogue,
}

/// A contiguous run of operations.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Section {
    /// What it is.
    pub kind: SectionKind,
    /// Index of its first operation.
    pub start: usize,
    /// One past its last operation.
    pub end: usize,
}

/// Storage that units take in turn: one buffer per segment, or per trainable segment where it holds gradients.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Slot {
    /// Elements of each buffer. Units with the same lengths share slots.
    pub lens: Vec<usize>,
}

/// One step as data.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Schedule {
    /// The operations, in program order.
    pub ops: Vec<Op>,
    /// The sections, covering all operations in order.
    pub sections: Vec<Section>,
    /// Unsharded slots.
    pub slots: Vec<Slot>,
    /// Gradient slots.
    pub gradient_slots: Vec<Slot>,
    /// Staging slots: shards on their way from host memory.
    pub staging_slots: Vec<Slot>,
    /// Reduced slots: reduced gradients on their way to host memory.
    pub reduced_slots: Vec<Slot>,
    /// Micro-batches per rank.
    pub rounds: usize,
    /// For every unit, whether a sub-shard is kept after forward.
    pub keeps_sub_shard: Vec<bool>,
}

impl Schedule {
    /// The operation of an id.
    pub fn op(&self, id: OpId) -> &Op {
        &self.ops[id.0]
    }

    /// The calls of blocks in one micro-batch (they are the same in all), in program order.
    pub fn calls(&self) -> Vec<OpKind> {
        let micro_batch = self.sections.iter().find(|section| section.kind == SectionKind::MicroBatch(0));
        let ops = micro_batch.map_or(&[][..], |section| &self.ops[section.start..section.end]);
        let is_call = |kind: &OpKind| {
            matches!(kind, OpKind::Forward { .. } | OpKind::Finish { .. } | OpKind::Backward { .. })
        };
        ops.iter().map(|op| op.kind).filter(is_call).collect()
    }
}

#[cfg(test)]
mod tests;
