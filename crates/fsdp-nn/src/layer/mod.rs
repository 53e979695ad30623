//! Layers: plain data that says which parameters an operation reads and how large it is.
//!
//! A layer holds parameter *ids* and sizes, never values; the operations of a
//! [`Builder`](crate::graph::Builder) take a layer, and its parameters are looked up when they run. Layers are made by
//! [`Describe`], which at the same time writes down modules, names, shapes and initialisation.

mod adapter;
mod describe;

use std::sync::Arc;

use fsdp_core::model::ParamId;

pub use crate::init::Init;
pub use adapter::{Adapter, Lora};
pub use describe::{Describe, Description};

use crate::backend::{AttentionDims, Orientation};

/// Something that reads parameters.
pub trait Layer {
    /// The parameters that it reads.
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
    /// How the weight is stored.
    pub orientation: Orientation,
}

impl Layer for Linear {
    fn params(&self) -> Vec<ParamId> {
        std::iter::once(self.weight).chain(self.bias).collect()
    }
}

/// The linear maps of experts of one kind, without biases; weights are `outputs x inputs`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertMaps {
    /// The weight of each expert.
    pub weights: Vec<ParamId>,
    /// Columns of `x`.
    pub inputs: usize,
    /// Columns of `y`.
    pub outputs: usize,
}

impl Layer for ExpertMaps {
    fn params(&self) -> Vec<ParamId> {
        self.weights.clone()
    }
}

/// A table of rows, looked up by token or by position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Embedding {
    /// The table.
    pub table: ParamId,
    /// Its rows.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
}

impl Layer for Embedding {
    fn params(&self) -> Vec<ParamId> {
        vec![self.table]
    }
}

impl Embedding {
    /// The output head that shares this table.
    pub fn as_head(&self) -> Head {
        Head { weight: self.table, vocab: self.rows, hidden: self.width, softcap: None }
    }
}

/// Root-mean-square norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNorm {
    /// The scale, less the offset.
    pub weight: ParamId,
    /// Elements of a row.
    pub width: usize,
    /// Added to the mean square.
    pub eps: f64,
    /// Added to the weight: 0, or 1 where the weight is the scale's difference from one (Gemma).
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
    /// The shift.
    pub bias: ParamId,
    /// Elements of a row.
    pub width: usize,
    /// Added to the variance.
    pub eps: f64,
}

impl Layer for LayerNorm {
    fn params(&self) -> Vec<ParamId> {
        vec![self.weight, self.bias]
    }
}

/// A norm of either kind.
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

/// The map from hidden states to logits; its weight is `vocab x hidden`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Head {
    /// The weight.
    pub weight: ParamId,
    /// Classes.
    pub vocab: usize,
    /// Columns of the hidden states.
    pub hidden: usize,
    /// What caps the logits smoothly, if anything does ([`HeadDims::softcap`](crate::op::HeadDims)).
    pub softcap: Option<f64>,
}

impl Layer for Head {
    fn params(&self) -> Vec<ParamId> {
        vec![self.weight]
    }
}

/// The heads of causal self-attention over packed projections, and which scores they have ([`Scores`](crate::op::Scores)).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Probability of dropping an attention weight.
    pub dropout: f64,
    /// What scores are multiplied with, where that is not `1 / sqrt(head_dim)`.
    pub scale: Option<f64>,
    /// What caps scores smoothly, if anything does.
    pub softcap: Option<f64>,
    /// Keys that a query sees at most, itself among them, where not all before it.
    pub window: Option<usize>,
}

impl Attention {
    /// Heads that see all keys before them, drop nothing, and scale by `1 / sqrt(head_dim)`.
    pub fn new(heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        Self { heads, kv_heads, head_dim, dropout: 0.0, scale: None, softcap: None, window: None }
    }

    /// The dimensions for so many samples of so many tokens.
    pub fn dims(&self, (batch, seq): (usize, usize)) -> AttentionDims {
        AttentionDims { batch, seq, heads: self.heads, kv_heads: self.kv_heads, head_dim: self.head_dim }
    }

    /// Elements of a packed row of queries, keys and values.
    pub fn packed(&self) -> usize {
        self.dims((1, 1)).packed()
    }
}

/// The angles of rotary position embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// One per pair of elements that rotates. Where there are fewer than a head has pairs, its first elements rotate and the
    /// rest stays (GPT-NeoX, Phi).
    pub inverse_frequencies: Arc<[f32]>,
    /// What sines and cosines are multiplied with: the attention factor of YaRN and LongRoPE, else 1.
    pub factor: f64,
}

impl Rope {
    /// The frequencies `theta^(-2i / rotary_dim)`, in single precision as Hugging Face computes them, for the first
    /// `rotary_dim` elements of a head: an even number.
    pub fn new(theta: f64, rotary_dim: usize) -> Self {
        let frequency = |i: usize| 1.0 / (theta as f32).powf((2 * i) as f32 / rotary_dim as f32);
        Self { inverse_frequencies: (0..rotary_dim / 2).map(frequency).collect(), factor: 1.0 }
    }

    /// Elements of a head that rotate.
    pub fn rotary_dim(&self) -> usize {
        2 * self.inverse_frequencies.len()
    }

    /// Cosines, then sines, of all angles of a position, times the factor. A product of position and frequency is rounded
    /// to single precision, as Hugging Face computes it; its sine and cosine are those of double precision.
    pub fn angles(&self, position: usize) -> impl Iterator<Item = f64> {
        let angle = move |&frequency: &f32| f64::from(position as f32 * frequency);
        let angles = self.inverse_frequencies.iter().map(angle);
        let cosines = angles.clone().map(|angle| angle.cos() * self.factor);
        cosines.chain(angles.map(|angle| angle.sin() * self.factor))
    }
}
