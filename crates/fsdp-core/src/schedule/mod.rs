//! The schedule: one training step (or evaluation) as data.
//!
//! A schedule declares **buffers**, and lists operations on them in **program order**. Each operation belongs to a
//! queue and names its operands; operations of one queue run in program order, operations of different queues are
//! ordered only by declared waits. The same list is executed by the engine, proven safe by the checker, measured by
//! the ledger and printed.
//!
//! It is the same on every rank, and a pure function of (model blocks, layout, mesh, policy, update rule, rounds):
//! policies are visible only in the compiler ([`compile_step`], [`compile_evaluation`]).

mod before;
mod buffers;
mod compile;
mod display;
mod emit;
mod live;
mod op;
mod order;
mod policy;

pub(crate) use before::Before;
pub use buffers::{BufferDecl, BufferId, Lasting, Place, Role, UnitBuffers};
pub use compile::{Compiler, compile_evaluation, compile_evaluation_alone, compile_step};
pub(crate) use display::describe;
pub use op::{Access, Op, OpKind, Phase, Round, Source};
pub use order::micro_batch_index;
pub use policy::{Accumulation, AccumulationOrder, Checkpointing, Offload, Policy, Reshard};

use crate::rank::Mesh;

/// Index of an operation in [`Schedule::ops`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub usize);

/// What a section of a schedule is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SectionKind {
    /// Before the first micro-batch.
    Prologue,
    /// One micro-batch.
    MicroBatch(Round),
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

/// One step as data.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Schedule {
    /// Everything that operations work on. A step and an evaluation that belong together declare the same.
    pub buffers: Vec<BufferDecl>,
    /// Which of them outlive a step.
    pub lasting: Lasting,
    /// The operations, in program order.
    pub ops: Vec<Op>,
    /// The sections, covering all operations in order.
    pub sections: Vec<Section>,
    /// Micro-batches per rank.
    pub rounds: usize,
    /// The ranks that meet in collectives.
    pub mesh: Mesh,
    /// Ranks that share the sub-shards of a unit, if any are kept.
    pub sub_group: Option<usize>,
    /// The number of ranks that a reduced gradient is the average over: what it is multiplied by to be the sum of all
    /// micro-batch gradients again. 1 where gradients are summed.
    pub averaged_ranks: usize,
}

impl Schedule {
    /// The operation of an id.
    pub fn op(&self, id: OpId) -> &Op {
        &self.ops[id.0]
    }

    /// The declaration of a buffer.
    pub fn buffer(&self, id: BufferId) -> &BufferDecl {
        &self.buffers[id.index()]
    }

    /// Whether it computes gradients.
    pub fn trains(&self) -> bool {
        self.ops.iter().any(|op| matches!(op.kind, OpKind::LastBlock { backward: true, .. }))
    }

    /// The calls of blocks in one micro-batch (they are the same in all), in program order.
    pub fn calls(&self) -> Vec<OpKind> {
        let micro_batch =
            self.sections.iter().find(|section| section.kind == SectionKind::MicroBatch(Round(0)));
        let ops = micro_batch.map_or(&[][..], |section| &self.ops[section.start..section.end]);
        ops.iter().map(|op| op.kind).filter(|kind| kind.block().is_some()).collect()
    }
}

#[cfg(test)]
mod tests;
