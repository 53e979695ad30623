//! One step, or one evaluation: buffers, and the operations on them in sections.

use super::{BufferDecl, BufferId, Lasting, Op, OpId};
use crate::mesh::{Axis, Group, Mesh};
use crate::program::{Pass, Round};
use crate::rank::Queue;

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
    /// Chunks of each sample on this rank: a block computes as many gradients (and those of experts as often as the expert
    /// axis has ranks), which are then added.
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
        op.kind.call().is_some() && (self.mesh.size(Axis::Context) > 1 || self.mesh.expert() > 1)
    }

    /// Whether the schedule computes gradients.
    pub fn trains(&self) -> bool {
        self.pass != Pass::Evaluate
    }
}
