//! Blocks as graphs of calls. A model is written as forward code only; the calls of every way to run it are derived
//! in advance.
//!
//! A model's code runs once per block against a [`Builder`], which produces a `BlockGraph`: values, and the calls
//! that compute them. For each way to run a block, the graph is lowered to a `BlockPlan`: lists of calls for forward,
//! recomputation and backward over *places*, whose live ranges begin and end at calls of a list. Running a block
//! means walking a list; so does predicting its memory.
//!
//! **Backward** is derived by one rule per operation, defined next to it in `op`. Forward keeps the values that
//! backward reads:
//!
//! | operation | kept |
//! |---|---|
//! | linear | its input, if the weight is trained |
//! | rms_norm, layer_norm | its input and two numbers (one for rms_norm) per row |
//! | activations (swiglu, gelu, ..) | their input |
//! | attention | packed projections, output, one number per head and row |
//! | rescale | its input, and the norms |
//! | short_convolution | its input |
//! | delta_rule | its convolved rows (recomputed) and gates |
//! | convert | nothing |
//! | rope, add, dropout, embedding, regroup, exchange | nothing (dropout masks come from counters) |
//! | route, dispatch, expert_product, combine | logits, routes and their weights, slots that went through experts |
//!
//! In training, every router writes a *load* to a table of the micro-batch, which is not a place. If there is a
//! balancing loss, the loss and every router's backward read the whole table. A second forward writes the same numbers
//! again.
//!
//! The output of a norm, an activation, a conversion or a rescaling is never kept: backward recomputes it from values that are kept anyway, in
//! one pass over memory, with the same bits. The first contribution to a value's gradient is written, later ones are
//! added, in backward order.
//!
//! **Recomputation** is the part of forward whose results backward or the next block reads. With selective
//! checkpointing it starts from the outputs of linear maps and of attention, which forward kept; otherwise from the
//! block's input.
//!
//! **In place** operations overwrite a value that is not read afterwards: by no later call, not by backward, and not
//! outside of the block.
//!
//! Values of forward are counted as [`Category::Activation`], as is the gradient of a block's input; everything else
//! in backward, and scratch, is `Workspace`.

mod batch;
mod builder;
mod chunks;
mod define;
mod derive;
mod forward;
mod gradients;
mod list;
mod plan;
mod rounds;
mod symbolic;
mod walk;

use fsdp_core::DType;
use fsdp_core::memory::Category;

use crate::layer::Rope;
use crate::op::{Attention, Cost, Op};

pub(crate) use batch::MicroBatch;
pub use builder::{Builder, Tensor};
pub(crate) use derive::Backward;
pub(crate) use list::Redistribution;
pub use list::{List, Step};
pub(crate) use plan::{BlockPlan, HeadCall, Request, Route};
pub(crate) use symbolic::{Contents, Symbols};
pub(crate) use walk::{Counting, DeviceRunner, Inputs, Routers, Runner, walk};

/// The declaration of a value of a graph or a place of a plan: a matrix of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decl {
    /// Number of rows.
    pub rows: usize,
    /// Elements per row.
    pub width: usize,
    /// The dtype of the elements.
    pub dtype: DType,
    /// The category its memory is counted in.
    pub category: Category,
}

impl Decl {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.rows * self.width
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// An operand of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// A range of a value (in a graph) or of a place (in a plan).
    Local {
        /// Index of the value or place.
        id: usize,
        /// The first element.
        offset: usize,
        /// Number of elements.
        len: usize,
    },
    /// A parameter, by its index in the block's list.
    Param(usize),
    /// The gradient of a parameter, by the same index. The first write of a micro-batch overwrites it, later ones add
    /// to it.
    ParamGradient(usize),
    /// The token ids of the micro-batch.
    Ids,
    /// The position of each token within its document, if samples are packed.
    Positions,
    /// The tokens to predict.
    Targets,
    /// The losses of the micro-batch.
    Losses,
    /// The z-loss part of the losses.
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
    /// Operands that are read, in the order of [`Op::describe`].
    pub reads: Vec<Operand>,
    /// Operands that are written, and whether the call adds to their contents. (For gradients of parameters, that is
    /// decided at run time.)
    pub writes: Vec<(Operand, bool)>,
    /// Index of the dropout site within the block, from 0; `None` if the call drops nothing.
    pub site: Option<u64>,
}

impl Call {
    /// A call without dropout.
    pub(crate) fn new(op: Op, reads: Vec<Operand>, writes: impl Into<Vec<(Operand, bool)>>) -> Self {
        Self { op, reads, writes: writes.into(), site: None }
    }

    /// Returns the cost, with values and parameter gradients of these dtypes.
    pub fn cost(&self, values: DType, gradients: DType) -> Cost {
        let added = self.writes.iter().zip(self.op.describe().writes).filter(|((_, add), _)| *add);
        let reread_bytes: usize = added.map(|(_, role)| role.touched * values.size_bytes()).sum();
        let cost = self.op.cost(values, gradients);
        Cost { bytes_read: cost.bytes_read + reread_bytes as u64, ..cost }
    }

    /// Whether the call changes a place or value.
    pub(crate) fn writes_to(&self, id: usize) -> bool {
        self.writes.iter().any(|(operand, _)| operand.local() == Some(id))
    }

    /// Whether a place or value is among the operands.
    #[cfg(test)]
    pub(crate) fn accesses(&self, id: usize) -> bool {
        self.locals().any(|local| local == id)
    }

    /// As an operation on the chunk with this index among those of its operands; `len` returns the elements that one chunk
    /// has of a place.
    fn of_chunk(&self, chunk: usize, len: impl Fn(usize) -> usize) -> Self {
        let move_to = |operand: Operand| match operand {
            Operand::Local { id, offset, len: elements } => {
                Operand::Local { id, offset: chunk * len(id) + offset, len: elements }
            }
            other => other,
        };
        Self {
            op: self.op.clone(),
            reads: self.reads.iter().copied().map(move_to).collect(),
            writes: self.writes.iter().map(|&(operand, add)| (move_to(operand), add)).collect(),
            site: self.site,
        }
    }

    /// Returns the places or values among the operands: reads first, then writes.
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

/// A group of calls: linear maps of one input, or a single operation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Node {
    /// The calls; their local operands are values.
    pub(crate) calls: Vec<Call>,
    /// For an in-place operation, the value that it overwrites with the first output of the last call.
    pub(crate) update: Option<usize>,
}

impl Node {
    pub(crate) fn op(&self) -> &Op {
        &self.main().op
    }

    /// Returns the last call; the others prepare it or are of the same kind.
    pub(crate) fn main(&self) -> &Call {
        self.calls.last().expect("a node has a call")
    }

    pub(crate) fn reads(&self) -> impl Iterator<Item = usize> {
        let reads = self.calls.iter().flat_map(|call| &call.reads).filter_map(Operand::local);
        let written: Vec<usize> = self.writes().collect();
        reads.filter(move |id| !written.contains(id)).chain(self.update)
    }

    pub(crate) fn writes(&self) -> impl Iterator<Item = usize> {
        self.calls.iter().flat_map(|call| &call.writes).filter_map(|(operand, _)| operand.local())
    }
}

/// The forward graph of a block.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct BlockGraph {
    values: Vec<Decl>,
    nodes: Vec<Node>,
    /// The output of the previous block; `None` for the first block.
    input: Option<usize>,
    output: usize,
}

impl BlockGraph {
    /// Returns the rotations of queries and keys.
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

/// Which parts of a block are trained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Trained {
    /// Per parameter of the block's list, whether it is trained.
    pub(crate) params: Vec<bool>,
    /// Whether a parameter before the block is trained, so that the block's input has a gradient.
    pub(crate) input: bool,
}
