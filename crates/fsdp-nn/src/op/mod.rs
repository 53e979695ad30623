//! Operations as values: everything that a device computes for a model, forward and backward, with sizes and
//! constants but without operands.
//!
//! Each family has one file with all of its operations: their definition, what each reads, writes and costs
//! ([`Op::describe`]), the method of [`Builder`](crate::graph::Builder) that adds it to a block, and its derivative.
//! An operation does not depend on rank, step or micro-batch; data that does (token ids, dropout keys) is passed as
//! an operand. All matrices are row-major. Arithmetic is done in the master dtype
//! ([`DType::master`](fsdp_core::DType::master)) of the tensors' dtype, statistics are stored in it, and results are
//! rounded once.

mod activation;
mod attention;
mod check;
mod cost;
mod delta;
mod dequantize;
mod describe;
mod dora;
mod exchange;
mod expert_axis;
mod expert_products;
mod experts;
mod gating;
mod head;
mod latent;
mod linear;
mod lookup;
mod norm;
mod pointwise;
mod rounds;
mod router_terms;
mod routing;

pub use activation::{Activation, CLAMP, Function, Pass, SWISH_SCALE};
pub use attention::{Attention, AttentionDims, Scores};
pub use cost::Cost;
pub use delta::{CHUNK, ConvolutionDims, Delta, DeltaDims, NORM_EPS};
pub use describe::{Access, Description, Kind, Role};
pub use dora::{AdaptedDims, Dora};
pub use exchange::Exchange;
pub(crate) use exchange::Rows;
pub use expert_axis::ExpertAxis;
pub use experts::{ExpertDims, Experts, Routes};
pub use gating::{Gating, Groups, SCORES_EPS, Scoring};
pub use head::{Head, HeadDims, IGNORED_TARGET, LogitsDims, LossTerms};
pub use latent::{Latent, LatentDims};
pub use linear::{Linear, LinearDims, Orientation};
pub use lookup::Lookup;
pub use norm::Norm;
pub use pointwise::{Dropout, Pointwise};
pub use rounds::Rounds;
pub(crate) use router_terms::ROUTER_SUMS;
pub use router_terms::RouterTerms;
pub use routing::{Places, Routing};

use crate::graph::{Backward, Node};
use crate::quantized::Packed;

/// An operation, by family. [`Op::describe`] names its operands.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "the families say what they are")]
pub enum Op {
    Linear(Linear),
    Dequantize(Packed),
    Dora(Dora),
    Lookup(Lookup),
    Norm(Norm),
    Attention(Attention),
    Latent(Latent),
    Delta(Delta),
    Activation(Activation),
    Pointwise(Pointwise),
    Experts(Experts),
    ExpertAxis(ExpertAxis),
    Exchange(Exchange),
    Head(Head),
}

impl Op {
    /// Returns the operation's description.
    ///
    /// # Panics
    /// If sizes contradict each other, which is a bug in this project.
    pub fn describe(&self) -> Description {
        match self {
            Op::Linear(op) => op.describe(),
            Op::Dequantize(op) => op.describe(),
            Op::Dora(op) => op.describe(),
            Op::Lookup(op) => op.describe(),
            Op::Norm(op) => op.describe(),
            Op::Attention(op) => op.describe(),
            Op::Latent(op) => op.describe(),
            Op::Delta(op) => op.describe(),
            Op::Activation(op) => op.describe(),
            Op::Pointwise(op) => op.describe(),
            Op::Experts(op) => op.describe(),
            Op::ExpertAxis(op) => op.describe(),
            Op::Exchange(op) => op.describe(),
            Op::Head(op) => op.describe(),
        }
    }

    /// Returns the name used in listings, traces and errors.
    pub fn name(&self) -> &'static str {
        self.describe().name
    }

    /// The rank of the expert axis over whose rows the operation computes the gradient of a parameter; 0 for all others.
    pub(crate) fn source(&self) -> usize {
        match self {
            Op::Experts(
                Experts::ProductBackwardWeight { source, .. } | Experts::BiasBackward { source, .. },
            ) => *source,
            _ => 0,
        }
    }

    /// Appends the backward of a graph node whose main operation is `self` and whose output is `output`.
    pub(crate) fn derive(&self, backward: &mut Backward<'_>, node: &Node, output: usize) {
        match self {
            Op::Linear(_) => linear::derive(backward, node, output),
            Op::Dora(op) => op.derive(backward, node, output),
            Op::Lookup(_) => lookup::derive(backward, node, output),
            Op::Norm(op) => op.derive(backward, node, output),
            Op::Attention(op) => op.derive(backward, node, output),
            Op::Latent(op) => op.derive(backward, node, output),
            Op::Delta(op) => op.derive(backward, node, output),
            Op::Activation(_) => activation::derive(backward, node, output),
            Op::Pointwise(op) => op.derive(backward, node, output),
            Op::Experts(op) => op.derive(backward, node, output),
            Op::ExpertAxis(op) => op.derive(backward, node, output),
            Op::Exchange(op) => op.derive(backward, node, output),
            Op::Dequantize(_) => unreachable!("it only prepares a product"),
            Op::Head(_) => unreachable!("the head is not part of a graph"),
        }
    }
}
