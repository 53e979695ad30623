//! The schedule: one training step (or evaluation) as data.
//!
//! A schedule declares **buffers**, and lists operations on them in **program order**. Each operation belongs to a
//! queue and names its operands. Operations of one queue run in program order; operations of different queues are
//! ordered only by declared waits. The engine executes the list, the checker proves it safe, and the ledger predicts
//! its memory; it can also be printed.
//!
//! A schedule is the same on every rank, and a pure function of (model blocks, layout, mesh, policy, update rule,
//! rounds). Policies are visible only to the compiler ([`compile_step`], [`compile_evaluation`]).

mod before;
mod buffers;
mod compile;
mod display;
mod emit;
mod live;
mod op;
mod order;
mod policy;

pub(crate) use before::HappensBefore;
pub use buffers::{BufferDecl, BufferId, Lasting, Place, Role, UnitBuffers};
pub use compile::{Compiler, compile_evaluation, compile_evaluation_alone, compile_step};
pub(crate) use display::describe;
pub use op::{Access, Op, OpKind, Phase, Round, Source};
pub use order::micro_batch_index;
pub use policy::{Accumulation, AccumulationOrder, Checkpointing, Offload, Policy, Reshard};

use crate::mesh::{Axis, Group, Mesh};
use crate::program::Pass;
use crate::rank::Queue;

/// Index of an operation in [`Schedule::ops`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub usize);

/// The kind of a section of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SectionKind {
    /// Before the first micro-batch.
    Prologue,
    /// One micro-batch.
    MicroBatch(Round),
    /// After the last micro-batch: norm and update.
    Epilogue,
}

/// A contiguous run of operations.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Section {
    /// The kind of the section.
    pub kind: SectionKind,
    /// Index of its first operation.
    pub start: usize,
    /// One past its last operation.
    pub end: usize,
}

/// One step, or one evaluation, as data.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Schedule {
    /// All buffers that operations use. A step and its evaluation declare the same buffers.
    pub buffers: Vec<BufferDecl>,
    /// The buffers that outlive a step.
    pub lasting: Lasting,
    /// The operations, in program order.
    pub ops: Vec<Op>,
    /// The sections, covering all operations in order.
    pub sections: Vec<Section>,
    /// What its micro-batches compute.
    pub pass: Pass,
    /// Micro-batches per rank.
    pub rounds: usize,
    /// Chunks of each sample on this rank: a block computes as many gradients, which are then added.
    pub chunks: usize,
    /// The ranks that take part in collectives.
    pub mesh: Mesh,
    /// The number of ranks that a reduced gradient is averaged over: multiplied by it, the gradient is the sum of all
    /// micro-batch gradients. 1 if gradients are summed.
    pub averaged_ranks: usize,
}

impl Schedule {
    /// Returns an operation by id.
    pub fn op(&self, id: OpId) -> &Op {
        &self.ops[id.0]
    }

    /// The declaration of a buffer.
    pub fn buffer(&self, id: BufferId) -> &BufferDecl {
        &self.buffers[id.index()]
    }

    /// The groups that its collectives run over, with their queues.
    pub fn groups(&self) -> impl Iterator<Item = (Queue, Group)> + '_ {
        self.ops.iter().filter_map(|op| op.kind.group().map(|group| (op.kind.queue(), group)))
    }

    /// Whether an operation meets those of other ranks: a call of a block that redistributes activations among them.
    pub fn meets(&self, op: &Op) -> bool {
        op.kind.call().is_some() && self.mesh.size(Axis::Context) > 1
    }

    /// Whether the schedule computes gradients.
    pub fn trains(&self) -> bool {
        self.pass != Pass::Evaluate
    }
}

#[cfg(test)]
mod tests;
