//! What a decoder is made of, as plain data: what a family says with its `config.json`.

use std::sync::Arc;

use crate::op::Function;

use super::names::Names;
use super::rope::RopeConfig;

/// A decoder-only transformer: tokens, layers of attention and an MLP, a last norm, and a head.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// What its modules are called; norms of a layer, packed weights and norms of queries and keys are there if they
    /// have names.
    pub names: Names,
    /// Tokens.
    pub vocab_size: usize,
    /// What embeddings are multiplied with, rounded to single precision and then to the type that values have.
    pub embedding_scale: f64,
    /// Probability of dropping an element of an embedding.
    pub embedding_dropout: f64,
    /// Elements of a hidden state.
    pub hidden_size: usize,
    /// Elements between the two halves of the MLP.
    pub intermediate_size: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key/value heads; divides the query heads.
    pub num_key_value_heads: usize,
    /// Elements of a head; even.
    pub head_dim: usize,
    /// What may differ between layers, one for each.
    pub layers: Vec<LayerConfig>,
    /// Whether a layer adds what attention and MLP make of the same input, rather than one after the other (GPT-NeoX).
    pub is_parallel: bool,
    /// Norms of queries and keys before they are rotated.
    pub qk_norm: Option<QkNorm>,
    /// Whether the rows of a packed projection go head by head: queries, keys and values of each (GPT-NeoX). Then there are as
    /// many key/value heads as query heads.
    pub qkv_by_head: bool,
    /// What scores are multiplied with, where that is not `1 / sqrt(head_dim)`.
    pub attention_scale: Option<f64>,
    /// What caps scores smoothly, if anything does.
    pub attention_softcap: Option<f64>,
    /// What caps logits smoothly, if anything does.
    pub logit_softcap: Option<f64>,
    /// Whether the MLP has a gate.
    pub is_gated: bool,
    /// What the gate of the MLP goes through, or where there is none its inner values.
    pub activation: Function,
    /// The norms of hidden states.
    pub norm: NormKind,
    /// Added to mean squares, or variances.
    pub norm_eps: f64,
    /// Whether the output head is the embedding.
    pub tie_word_embeddings: bool,
    /// Whether the projections to queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the projection from the values that attention mixed has a bias.
    pub output_bias: bool,
    /// Whether the projections of the MLP have biases.
    pub mlp_bias: bool,
    /// Probability of dropping an attention weight.
    pub attention_dropout: f64,
    /// Probability of dropping an element of what a half layer adds.
    pub residual_dropout: f64,
    /// Coefficient of the balancing loss of routers; 0 if there is none.
    pub router_loss: f64,
    /// Deviation of initial weights.
    pub initializer_range: f64,
    /// The positions it was made for; nothing depends on it.
    pub max_position_embeddings: usize,
}

/// What may differ between the layers of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerConfig {
    /// How queries and keys are rotated, if they are.
    pub rope: Option<Arc<RopeConfig>>,
    /// Keys that a query sees at most, itself among them, where not all before it.
    pub window: Option<usize>,
    /// The mixture of experts in the place of the MLP, if there is one.
    pub mixture: Option<Mixture>,
}

/// A mixture of experts, each an MLP with a gate and without biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mixture {
    /// Experts.
    pub experts: usize,
    /// Experts that a token is sent to.
    pub top: usize,
    /// Elements between the two halves of an expert.
    pub inner: usize,
    /// Whether the weights of a token's experts sum to one.
    pub is_normalized: bool,
}

/// The kinds of norms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Root-mean-square norms.
    Rms,
    /// The same, with weights that are the scales' differences from one (Gemma).
    CentredRms,
    /// Layer norms, with biases.
    Layer,
}

/// What a norm of queries and keys is taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// Every head, all with the same weight (Qwen 3).
    Heads,
    /// All heads of a token together (OLMo 2).
    Rows,
}
