//! Operations as values: everything that a device computes for a model, forward and backward, with sizes and
//! constants but without operands.
//!
//! An operation says what it reads and writes ([`Op::signature`]), what it costs ([`Op::cost`]) and how it is called
//! ([`Op::name`]). Nothing in it depends on rank, step or micro-batch: what does (token ids, dropout keys) is an operand.
//! All matrices are row-major; statistics are kept in the master dtype ([`DType::master`](fsdp_core::DType::master)) of
//! the tensors' dtype. Arithmetic is done in the master dtype, and results are rounded once.

mod check;
mod cost;
mod dims;
mod signature;

use std::sync::Arc;

pub use cost::Cost;
pub use dims::{AttentionDims, Dropout, HeadDims, IGNORED_TARGET, LinearDims, Orientation};
pub use signature::{Access, Kind, Role, Signature};

/// An operation. Operands are named as in [`Op::signature`].
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "sizes are what they are called")]
pub enum Op {
    /// `y = x W (+ bias)`.
    Linear { dims: LinearDims, bias: bool },
    /// `dx = dy W^T`.
    LinearBackwardInput { dims: LinearDims },
    /// `dweight = x^T dy`, in the weight's orientation.
    LinearBackwardWeight { dims: LinearDims },
    /// Sums of the columns of `dy`, whose rows begin `stride` elements apart: the gradient of a bias.
    ColumnSums { rows: usize, columns: usize, stride: usize },
    /// Row `i` of `y` is row `ids[i]` of `table`.
    Embedding { rows: usize, width: usize, table_rows: usize },
    /// Adds row `i` of `dy` to row `ids[i]` of `dtable`, in the order of `i`.
    EmbeddingBackward { rows: usize, width: usize, table_rows: usize },
    /// The position of every row of a batch, as ids.
    Positions { samples: usize, seq: usize },
    /// Root-mean-square norm of every row: `y = x * rstd * weight`.
    RmsNorm { rows: usize, width: usize, eps: f64 },
    /// Backward of [`Op::RmsNorm`], to the weight too if `weight`.
    RmsNormBackward { rows: usize, width: usize, weight: bool },
    /// Layer norm of every row: `y = (x - mean) * rstd * weight + bias`; `stats` holds mean and rstd, interleaved.
    LayerNorm { rows: usize, width: usize, eps: f64 },
    /// Backward of [`Op::LayerNorm`] to its input.
    LayerNormBackwardInput { rows: usize, width: usize },
    /// Column sums of `dy * (x - mean) * rstd`. (The gradient of the bias is [`Op::ColumnSums`].)
    LayerNormBackwardWeight { rows: usize, width: usize },
    /// Rotary position embedding of the query and key heads of packed rows, in the convention of Hugging Face (element
    /// `i` is rotated with element `i + head_dim / 2`); `backward` rotates the other way.
    Rope { dims: AttentionDims, inverse_frequencies: Arc<[f32]>, backward: bool },
    /// Causal attention, and the log-sum-exp of every (sample, head, position). Scores are scaled by
    /// `1 / sqrt(head_dim)`. Dropout (0: none) applies to the probabilities; element index
    /// `(head * seq + query) * seq + key`.
    Attention { dims: AttentionDims, dropout: f64 },
    /// Backward of [`Op::Attention`].
    AttentionBackward { dims: AttentionDims, dropout: f64 },
    /// `y = silu(gate) * up`.
    Swiglu { len: usize },
    /// Backward of [`Op::Swiglu`].
    SwigluBackward { len: usize },
    /// [`Op::SwigluBackward`] that leaves the output of [`Op::Swiglu`] where `dy` was: for whoever did not keep it.
    SwigluBackwardAgain { len: usize },
    /// GELU in the tanh form (`gelu_new`).
    Gelu { len: usize },
    /// Backward of [`Op::Gelu`].
    GeluBackward { len: usize },
    /// [`Op::GeluBackward`] that leaves the output of [`Op::Gelu`] where `dy` was.
    GeluBackwardAgain { len: usize },
    /// `y = a + b`.
    Add { len: usize },
    /// `y += x`.
    Accumulate { len: usize },
    /// `y = x`.
    Copy { len: usize },
    /// Dropout in place; applied to a gradient it is its own backward.
    Dropout { len: usize, samples: usize, p: f64 },
    /// Cross-entropy of `logits = x W^T` (`weight` is `vocab x hidden`) against `targets`; a loss is 0 where the target
    /// is [`IGNORED_TARGET`].
    HeadLoss { dims: HeadDims },
    /// [`Op::HeadLoss`] with the gradients of the **sum** of losses, to the weight too if `weight`. The gradient of the
    /// logits may be rounded to the tensors' dtype before the products: devices multiply operands of one dtype. It has
    /// room of its own if `rounds`.
    HeadLossBackward { dims: HeadDims, weight: bool, rounds: bool },
    /// `logits = x W^T` for all rows.
    HeadLogits { dims: HeadDims },
    /// The losses of rows of logits of any float dtype. Where devices do not look at targets on the host, one that is no
    /// class makes its loss not a number.
    CrossEntropy { rows: usize, vocab: usize },
    /// [`Op::CrossEntropy`] with the gradient of the sum of losses: where the logits were, or, if `rounds`, rounded to
    /// `dlogits`.
    CrossEntropyBackward { rows: usize, vocab: usize, rounds: bool },
}

impl Op {
    /// What it is called in listings, traces and errors.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Linear { .. } => "linear",
            Op::LinearBackwardInput { .. } => "linear_backward_input",
            Op::LinearBackwardWeight { .. } => "linear_backward_weight",
            Op::ColumnSums { .. } => "column_sums",
            Op::Embedding { .. } => "embedding",
            Op::EmbeddingBackward { .. } => "embedding_backward",
            Op::Positions { .. } => "positions",
            Op::RmsNorm { .. } => "rms_norm",
            Op::RmsNormBackward { .. } => "rms_norm_backward",
            Op::LayerNorm { .. } => "layer_norm",
            Op::LayerNormBackwardInput { .. } => "layer_norm_backward_input",
            Op::LayerNormBackwardWeight { .. } => "layer_norm_backward_weight",
            Op::Rope { backward: false, .. } => "rope",
            Op::Rope { backward: true, .. } => "rope_backward",
            Op::Attention { .. } => "attention",
            Op::AttentionBackward { .. } => "attention_backward",
            Op::Swiglu { .. } => "swiglu",
            Op::SwigluBackward { .. } => "swiglu_backward",
            Op::SwigluBackwardAgain { .. } => "swiglu_backward_again",
            Op::Gelu { .. } => "gelu",
            Op::GeluBackward { .. } => "gelu_backward",
            Op::GeluBackwardAgain { .. } => "gelu_backward_again",
            Op::Add { .. } => "add",
            Op::Accumulate { .. } => "accumulate",
            Op::Copy { .. } => "copy",
            Op::Dropout { .. } => "dropout",
            Op::HeadLoss { .. } => "head_loss",
            Op::HeadLossBackward { .. } => "head_loss_backward",
            Op::HeadLogits { .. } => "head_logits",
            Op::CrossEntropy { .. } => "cross_entropy",
            Op::CrossEntropyBackward { .. } => "cross_entropy_backward",
        }
    }

    /// How many dropout keys it takes: one per sample, where it drops anything.
    pub fn key_count(&self) -> usize {
        match *self {
            Op::Attention { dims, dropout } | Op::AttentionBackward { dims, dropout } if dropout > 0.0 => {
                dims.batch
            }
            Op::Dropout { samples, .. } => samples,
            _ => 0,
        }
    }

    /// The dropout of the operation with these keys.
    pub fn dropout<'a>(&self, keys: &'a [u64]) -> Option<Dropout<'a>> {
        match *self {
            Op::Attention { dropout: p, .. }
            | Op::AttentionBackward { dropout: p, .. }
            | Op::Dropout { p, .. }
                if p > 0.0 =>
            {
                Some(Dropout { p, keys })
            }
            _ => None,
        }
    }
}
