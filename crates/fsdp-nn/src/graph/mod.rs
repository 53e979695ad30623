//! Blocks as graphs of calls: a model is written as forward only, and what runs is worked out before it runs.
//!
//! A model's code runs once per block against a [`Builder`], which leaves a `BlockGraph`: values, and the calls that
//! make them. A `BlockPlan` is made of it for each way to run a block: lists of calls for forward, recomputation and
//! backward over *places*, which begin and end with certain calls of a list. Running a block is walking a list, and so
//! is predicting its memory.
//!
//! **Backward** is derived by a rule for each operation, which stands beside it in `op`. What forward keeps is what backward reads:
//!
//! | operation | kept |
//! |---|---|
//! | linear | its input, if the weight is trained |
//! | rms_norm, layer_norm | its input and two numbers (one for rms_norm) per row |
//! | activations (swiglu, gelu, ..) | their input |
//! | attention | packed projections, output, one number per head and row |
//! | rope, add, dropout, embedding, regroup | nothing (dropout masks come from counters) |
//! | route, dispatch, expert_product, combine | logits, routes and their weights, slots that went through experts |
//!
//! Routers whose experts are balanced leave a *load* each, in a table of the micro-batch that is no place: the loss and every
//! router's backward read all of it. A second forward writes the same numbers again.
//!
//! The output of a norm or an activation is never kept: backward computes it again from what is kept anyway, one
//! pass over memory, with the same bits. The first gradient that reaches a value is written, later ones are added, in
//! backward order.
//!
//! **Recomputation** is the part of forward that backward, or the next block, reads. With selective checkpointing it
//! begins at the outputs of linear maps and of attention, which forward kept; without, at the block's input.
//!
//! **In place** work operations where nobody reads the value afterwards: no later call, no backward, and nobody outside
//! of the block.
//!
//! Values of forward are counted as [`Category::Activation`], as is the gradient of a block's input; all else in
//! backward, and scratch, is `Workspace`.

mod batch;
mod builder;
mod derive;
mod forward;
mod gradients;
mod list;
mod plan;
mod walk;

use fsdp_core::DType;
use fsdp_core::memory::Category;

use crate::layer::Rope;
use crate::op::{Attention, Cost, Op};

pub(crate) use batch::MicroBatch;
pub use builder::{Builder, Tensor};
pub(crate) use derive::Backward;
pub use list::{List, Step};
pub(crate) use plan::{BlockPlan, HeadCall, Request, Route};
pub(crate) use walk::{Counting, DeviceRunner, Inputs, Routers, Runner, walk};

/// A value of a graph, or a place of a plan: some rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decl {
    /// Number of rows.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
    /// Their type.
    pub dtype: DType,
    /// What the place of it is counted as.
    pub category: Category,
}

impl Decl {
    /// Elements.
    pub fn len(&self) -> usize {
        self.rows * self.width
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What a call reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// A range of a value, in a graph, or of a place, in a plan.
    Local {
        /// Which.
        id: usize,
        /// The first element.
        offset: usize,
        /// Number of elements.
        len: usize,
    },
    /// A parameter, by its number in the block's list.
    Param(usize),
    /// The gradient of a parameter, which the first write of a micro-batch overwrites and others add to.
    ParamGradient(usize),
    /// The tokens of the micro-batch.
    Ids,
    /// The position of each of them within its document, where samples hold several.
    Positions,
    /// The tokens to predict.
    Targets,
    /// The losses of the micro-batch.
    Losses,
    /// What of them is z-loss.
    ZLosses,
    /// The load of the block's experts in the micro-batch.
    Load,
    /// The loads of all mixtures.
    Loads,
    /// The balancing loss of the micro-batch.
    RouterLoss,
}

/// An operation with its operands.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// The operation.
    pub op: Op,
    /// What it reads, in the order of [`Op::describe`].
    pub reads: Vec<Operand>,
    /// What it writes, and whether it adds to what is there. (For gradients of parameters that is known when it runs.)
    pub writes: Vec<(Operand, bool)>,
    /// Which dropout of the block it is, counted from 0, where it drops anything.
    pub site: Option<u64>,
}

impl Call {
    /// A call that drops nothing.
    pub(crate) fn new(op: Op, reads: Vec<Operand>, writes: impl Into<Vec<(Operand, bool)>>) -> Self {
        Self { op, reads, writes: writes.into(), site: None }
    }

    /// What it costs, with gradients of parameters of a dtype.
    pub fn cost(&self, values: DType, gradients: DType) -> Cost {
        let added = self.writes.iter().zip(self.op.describe().writes).filter(|((_, add), _)| *add);
        let read_again: usize = added.map(|(_, role)| role.touched * values.size_bytes()).sum();
        let cost = self.op.cost(values, gradients);
        Cost { bytes_read: cost.bytes_read + read_again as u64, ..cost }
    }

    /// The places or values among its operands: what is read, then what is written.
    fn locals(&self) -> impl Iterator<Item = usize> {
        self.reads.iter().chain(self.writes.iter().map(|(operand, _)| operand)).filter_map(Operand::local)
    }
}

impl Operand {
    pub(crate) fn local(&self) -> Option<usize> {
        match self {
            Operand::Local { id, .. } => Some(*id),
            _ => None,
        }
    }
}

/// Calls that belong together: linear maps of one input, or a single operation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Node {
    /// Their operands are values.
    pub(crate) calls: Vec<Call>,
    /// The value that the operation turns into the first one that the last call writes, where it works in place.
    pub(crate) update: Option<usize>,
}

impl Node {
    pub(crate) fn op(&self) -> &Op {
        &self.main().op
    }

    /// The last call: those before it prepare it, or are alike.
    pub(crate) fn main(&self) -> &Call {
        self.calls.last().expect("a node has a call")
    }

    pub(crate) fn reads(&self) -> impl Iterator<Item = usize> {
        let reads = self.calls.iter().flat_map(|call| &call.reads).filter_map(Operand::local);
        let own: Vec<usize> = self.writes().collect();
        reads.filter(move |id| !own.contains(id)).chain(self.update)
    }

    pub(crate) fn writes(&self) -> impl Iterator<Item = usize> {
        self.calls.iter().flat_map(|call| &call.writes).filter_map(|(operand, _)| operand.local())
    }
}

/// A block, forward.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct BlockGraph {
    values: Vec<Decl>,
    nodes: Vec<Node>,
    /// The value that comes from the block before.
    input: Option<usize>,
    output: usize,
}

impl BlockGraph {
    /// By what queries and keys are rotated.
    pub(crate) fn ropes(&self) -> impl Iterator<Item = &Rope> {
        self.nodes.iter().filter_map(|node| match node.op() {
            Op::Attention(Attention::Rope { rope, .. }) => Some(rope),
            _ => None,
        })
    }

    fn producer(&self, value: usize) -> Option<(usize, &Node)> {
        self.nodes.iter().enumerate().find(|(_, node)| node.writes().any(|id| id == value))
    }
}

/// What of a block is trained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Trained {
    /// By number in the block's list of parameters.
    pub(crate) params: Vec<bool>,
    /// Whether something is trained before the block, so that its input has a gradient.
    pub(crate) input: bool,
}
