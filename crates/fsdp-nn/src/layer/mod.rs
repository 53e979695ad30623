//! Layers: plain data that gives the parameters an operation reads and its sizes.
//!
//! A layer holds parameter *ids* and sizes, never values. The operations of a [`Builder`](crate::graph::Builder) take
//! a layer, and its parameters are looked up when they run. [`Describe`] creates layers while it records modules,
//! names, shapes and initialization.

mod adapter;
mod describe;

use std::sync::Arc;

use fsdp_core::model::ParamId;

pub use crate::init::Init;
pub use adapter::{Adapter, Lora};
pub use describe::{Describe, Description};

use crate::backend::{AttentionDims, Orientation};
use crate::op::{DeltaDims, ExpertDims};
use crate::quantized::Packed;

/// A layer that reads parameters.
pub trait Layer {
    /// Returns the parameters that it reads.
    fn params(&self) -> Vec<ParamId>;
}

/// A linear map `y = x W (+ b)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Linear {
    /// The weight.
    pub weight: ParamId,
    /// The bias, if there is one.
    pub bias: Option<ParamId>,
    /// Columns of `x`.
    pub inputs: usize,
    /// Columns of `y`.
    pub outputs: usize,
    /// Storage order of the weight.
    pub orientation: Orientation,
}

impl Layer for Linear {
    fn params(&self) -> Vec<ParamId> {
        std::iter::once(self.weight).chain(self.bias).collect()
    }
}

/// One linear map per expert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertMaps {
    /// The weight of each expert.
    pub weights: Vec<ParamId>,
    /// The bias of each expert; empty if there are none.
    pub biases: Vec<ParamId>,
    /// The sizes of a map.
    pub dims: ExpertDims,
}

impl ExpertMaps {
    /// Maps of these sizes, without parameters.
    pub fn new(inputs: usize, outputs: usize, orientation: Orientation) -> Self {
        let dims = ExpertDims { inputs, outputs, orientation, format: None };
        Self { weights: Vec::new(), biases: Vec::new(), dims }
    }
}

impl Layer for ExpertMaps {
    fn params(&self) -> Vec<ParamId> {
        [&self.weights[..], &self.biases].concat()
    }
}

/// A quantized weight of a linear map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedWeight {
    /// The matrix, whose rows are outputs.
    pub matrix: Packed,
    /// The order that the weight has as floats.
    pub orientation: Orientation,
}

/// A table of rows, looked up by token or by position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Embedding {
    /// The table's parameter.
    pub table: ParamId,
    /// Number of rows.
    pub rows: usize,
    /// Elements per row.
    pub width: usize,
    /// The row that looking up gives no gradient: `padding_idx` of PyTorch. An output head that shares the table still
    /// gives it one.
    pub padding: Option<usize>,
}

impl Layer for Embedding {
    fn params(&self) -> Vec<ParamId> {
        vec![self.table]
    }
}

impl Embedding {
    /// Returns an output head that shares this table.
    pub fn as_head(&self) -> Head {
        Head { weight: self.table, vocab: self.rows, hidden: self.width, softcap: None }
    }
}

/// Root-mean-square norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNorm {
    /// The scale minus `offset`.
    pub weight: ParamId,
    /// Elements per row.
    pub width: usize,
    /// Added to the mean square.
    pub eps: f64,
    /// Added to the weight: 0, or 1 if the weight is the difference of the scale from one (Gemma).
    pub offset: f64,
}

impl Layer for RmsNorm {
    fn params(&self) -> Vec<ParamId> {
        vec![self.weight]
    }
}

/// Layer norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerNorm {
    /// The scale.
    pub weight: ParamId,
    /// The shift, if there is one.
    pub bias: Option<ParamId>,
    /// Elements per row.
    pub width: usize,
    /// Added to the variance.
    pub eps: f64,
}

impl Layer for LayerNorm {
    fn params(&self) -> Vec<ParamId> {
        std::iter::once(self.weight).chain(self.bias).collect()
    }
}

/// Either kind of norm.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(missing_docs, reason = "the structs say what they are")]
pub enum Norm {
    Rms(RmsNorm),
    Layer(LayerNorm),
}

impl Layer for Norm {
    fn params(&self) -> Vec<ParamId> {
        match self {
            Norm::Rms(norm) => norm.params(),
            Norm::Layer(norm) => norm.params(),
        }
    }
}

/// The linear map from hidden states to logits; its weight is `vocab x hidden`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Head {
    /// The weight.
    pub weight: ParamId,
    /// Number of classes.
    pub vocab: usize,
    /// Elements per hidden state.
    pub hidden: usize,
    /// Soft cap of the logits ([`HeadDims::softcap`](crate::op::HeadDims)). `None` for no cap.
    pub softcap: Option<f64>,
}

impl Layer for Head {
    fn params(&self) -> Vec<ParamId> {
        vec![self.weight]
    }
}

/// The heads of causal self-attention over packed projections, and their score options
/// ([`Scores`](crate::op::Scores)).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Number of query heads.
    pub heads: usize,
    /// Number of key/value heads.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Dropout rate of attention weights.
    pub dropout: f64,
    /// Factor of the scores; `None` for `1 / sqrt(head_dim)`.
    pub scale: Option<f64>,
    /// Soft cap of the scores. `None` for no cap.
    pub softcap: Option<f64>,
    /// Maximum number of keys that a query sees, including its own. `None` for all earlier keys.
    pub window: Option<usize>,
}

impl Attention {
    /// Heads without a window, cap or dropout, and with scale `1 / sqrt(head_dim)`.
    pub fn new(heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        Self { heads, kv_heads, head_dim, dropout: 0.0, scale: None, softcap: None, window: None }
    }

    /// Returns the dimensions for `batch` samples of `seq` tokens.
    pub fn dims(&self, (batch, seq): (usize, usize)) -> AttentionDims {
        AttentionDims { batch, seq, heads: self.heads, kv_heads: self.kv_heads, head_dim: self.head_dim }
    }

    /// Elements per packed row of queries, keys and values.
    pub fn packed(&self) -> usize {
        self.dims((1, 1)).packed()
    }
}

/// A convolution of every element of a row with those of the rows before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Convolution {
    /// The weights, `width x 1 x kernel`, as of PyTorch's `Conv1d` with as many groups as channels.
    pub weight: ParamId,
    /// Elements per row.
    pub width: usize,
    /// Rows that a result depends on.
    pub kernel: usize,
}

impl Layer for Convolution {
    fn params(&self) -> Vec<ParamId> {
        vec![self.weight]
    }
}

/// The heads of linear attention, and the parameters of their decay ([`Delta::Scan`](crate::op::Delta)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaGates {
    /// The logarithm of the rate of decay of each value head.
    pub a_log: ParamId,
    /// What is added to `a` of each value head.
    pub dt_bias: ParamId,
    /// Sizes of heads; those of a batch are not among them.
    pub dims: DeltaDims,
}

impl Layer for DeltaGates {
    fn params(&self) -> Vec<ParamId> {
        vec![self.a_log, self.dt_bias]
    }
}

/// The angles of rotary position embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// One per pair of rotating elements. With fewer than the pairs of a head, only its first elements rotate
    /// (GPT-NeoX, Phi).
    pub inverse_frequencies: Arc<[f32]>,
    /// Factor of sines and cosines: the attention factor of YaRN and LongRoPE, otherwise 1.
    pub factor: f64,
}

impl Rope {
    /// The frequencies `theta^(-2i / rotary_dim)` for the first `rotary_dim` elements of a head (an even number), in
    /// single precision as Hugging Face computes them.
    pub fn new(theta: f64, rotary_dim: usize) -> Self {
        let frequency = |i: usize| 1.0 / (theta as f32).powf((2 * i) as f32 / rotary_dim as f32);
        Self { inverse_frequencies: (0..rotary_dim / 2).map(frequency).collect(), factor: 1.0 }
    }

    /// Number of rotating elements per head.
    pub fn rotary_dim(&self) -> usize {
        2 * self.inverse_frequencies.len()
    }

    /// Returns the cosines, then the sines, of all angles of a position, times the factor. The product of position
    /// and frequency is rounded to single precision, as in Hugging Face; sine and cosine are computed in double
    /// precision.
    pub fn angles(&self, position: usize) -> impl Iterator<Item = f64> {
        let angle = move |&frequency: &f32| f64::from(position as f32 * frequency);
        let angles = self.inverse_frequencies.iter().map(angle);
        let cosines = angles.clone().map(|angle| angle.cos() * self.factor);
        cosines.chain(angles.map(|angle| angle.sin() * self.factor))
    }
}
