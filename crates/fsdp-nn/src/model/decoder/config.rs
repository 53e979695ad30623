//! The configuration of a decoder, as plain data. Model families derive it from their `config.json`.

use std::sync::Arc;

use crate::op::{Function, Gating};

use super::names::Names;
use super::rope::RopeConfig;

/// A decoder-only transformer: token embedding, layers of attention and an MLP, a final norm, and a head.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Names of its modules. Norms of a layer exist if they have names; weights are packed if they share one name.
    pub names: Names,
    /// Vocabulary size.
    pub vocab_size: usize,
    /// The row of the embedding that inputs give no gradient. `None` if all are trained alike.
    pub padding_row: Option<usize>,
    /// Factor of the embeddings, in single precision.
    pub embedding_scale: f64,
    /// Whether that factor is rounded to the dtype of values (Gemma).
    pub embedding_scale_rounds: bool,
    /// Dropout rate of embeddings.
    pub embedding_dropout: f64,
    /// Elements per hidden state.
    pub hidden_size: usize,
    /// Inner width of the MLP.
    pub intermediate_size: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key/value heads; divides the number of query heads.
    pub num_key_value_heads: usize,
    /// Elements per head; even. Those of latent attention have their own sizes.
    pub head_dim: usize,
    /// Latent attention instead of projections to heads. `None` for such projections.
    pub latent: Option<LatentAttention>,
    /// Settings that may differ between layers; one entry per layer.
    pub layers: Vec<LayerConfig>,
    /// Whether attention and MLP read the same input and the layer adds both results, instead of one after the other
    /// (GPT-NeoX). An MLP without a norm of its own then reads the output of that of attention (Cohere).
    pub is_parallel: bool,
    /// Norms of queries and keys. `None` for no norms.
    pub qk_norm: Option<QkNorm>,
    /// Whether the rows of a packed projection are ordered by head: queries, keys and values of each (GPT-NeoX). The
    /// number of key/value heads then equals that of query heads.
    pub qkv_by_head: bool,
    /// Whether neighboring elements of a head rotate together, instead of those half of the rotating elements apart
    /// (ERNIE, Cohere, GLM). Projections are not packed then.
    pub rotates_neighbors: bool,
    /// Factor of the scores; `None` for `1 / sqrt(head_dim)`.
    pub attention_scale: Option<f64>,
    /// Soft cap of the scores. `None` for no cap.
    pub attention_softcap: Option<f64>,
    /// Factor of what each half of a layer adds.
    pub residual_scale: f64,
    /// Factor of the logits; hidden states are multiplied with it.
    pub logit_scale: f64,
    /// Soft cap of the logits. `None` for no cap.
    pub logit_softcap: Option<f64>,
    /// Whether the MLP has a gate.
    pub is_gated: bool,
    /// Activation of the MLP's gate or, without a gate, of its inner values.
    pub activation: Function,
    /// The norms of hidden states.
    pub norm: NormKind,
    /// Added to mean squares, or variances.
    pub norm_eps: f64,
    /// Whether the output head shares the embedding table.
    pub tie_word_embeddings: bool,
    /// Whether the projections to queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the attention output projection has a bias.
    pub output_bias: bool,
    /// Whether every query head has a sink: a score without a value (gpt-oss).
    pub sinks: bool,
    /// Whether what heads attend to is multiplied by the logistic function of a gate, to which the projection to queries maps,
    /// too, head by head (Qwen 3 Next). Norms of heads come before rotation then.
    pub attention_gate: bool,
    /// Whether the projections of the MLP have biases.
    pub mlp_bias: bool,
    /// Dropout rate of attention weights.
    pub attention_dropout: f64,
    /// Dropout rate of the output of each half of a layer.
    pub residual_dropout: f64,
    /// Coefficient of the routers' balancing loss; 0 if there is none.
    pub router_loss: f64,
    /// The ends of the names of parameters that are kept in f32.
    pub keep_f32: &'static [&'static str],
    /// Standard deviation of initial weights.
    pub initializer_range: f64,
    /// Number of positions the model was made for; the model does not depend on it.
    pub max_position_embeddings: usize,
}

/// Settings that may differ between the layers of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerConfig {
    /// Rotation of queries and keys. `None` for no rotation.
    pub rope: Option<Arc<RopeConfig>>,
    /// Maximum number of keys that a query sees, including its own. `None` for all earlier keys.
    pub window: Option<usize>,
    /// The mixture of experts that replaces the MLP, if any.
    pub mixture: Option<Mixture>,
    /// The linear attention that replaces attention, if any.
    pub delta: Option<DeltaNet>,
}

/// Linear attention by the gated delta rule (Qwen 3 Next).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaNet {
    /// Number of key heads, and of query heads.
    pub key_heads: usize,
    /// Number of value heads, a multiple of that of key heads.
    pub value_heads: usize,
    /// Elements per query or key head.
    pub key_dim: usize,
    /// Elements per value head.
    pub value_dim: usize,
    /// Rows that the short convolution sees.
    pub kernel: usize,
    /// Whether projections are packed, in the order of key heads.
    pub by_head: bool,
}

/// Multi-head latent attention (DeepSeek V2): queries, and keys with values, are projected to a few elements, which are
/// normed and projected to heads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatentAttention {
    /// Elements that queries are projected to first. `None` for one projection to the heads.
    pub query_rank: Option<usize>,
    /// Elements that keys and values are projected to first.
    pub kv_rank: usize,
    /// Elements of a query or key head without position.
    pub fixed: usize,
    /// Elements of a query or key head that rotate; all key heads share theirs. Even.
    pub rotating: usize,
    /// Elements of a value head.
    pub value: usize,
    /// Whether neighbors rotate together, instead of elements of the first and second half.
    pub interleaved: bool,
}

/// A mixture of experts, each a gated MLP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mixture {
    /// Number of experts.
    pub experts: usize,
    /// Number of experts per token.
    pub top: usize,
    /// Inner width of an expert.
    pub inner: usize,
    /// How experts are chosen and weighed.
    pub gating: Gating,
    /// Factor of the weights.
    pub scale: f64,
    /// An MLP that all tokens go through as well, if there is one.
    pub shared: Option<SharedExpert>,
    /// The form of the experts' weights, if they have one weight to gate and up.
    pub packed: Option<PackedExperts>,
    /// The function of what the gate multiplies, if there is one.
    pub up_activation: Option<Function>,
}

impl Mixture {
    /// Experts that a softmax chooses, without a shared one.
    pub fn softmax([experts, top]: [usize; 2], inner: usize, normalized: bool) -> Self {
        let gating = Gating::softmax(normalized);
        Self { experts, top, inner, gating, scale: 1.0, shared: None, packed: None, up_activation: None }
    }
}

/// Experts with one weight to gate and up. All weights are `inputs x outputs`, so that those of all experts, one after the
/// other, are the stacks of published files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedExperts {
    /// Whether columns of gate and up take turns, instead of those of gate coming first.
    pub interleaved: bool,
    /// Whether experts have biases.
    pub bias: bool,
}

/// The MLP of a mixture that all tokens go through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedExpert {
    /// Its inner width.
    pub inner: usize,
    /// Whether its output has a weight, the logistic function of a linear map (Qwen 2 MoE).
    pub is_weighed: bool,
}

/// The kind of a norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Root-mean-square norms.
    Rms,
    /// Root-mean-square norms whose weights are added to one to give the scale (Gemma).
    CentredRms,
    /// Layer norms, with biases.
    Layer,
    /// Layer norms without biases (Cohere).
    LayerWithoutBias,
}

/// The elements that a norm of queries and keys covers, before rotation unless it says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// Each head separately, all with the same weight (Qwen 3).
    Heads,
    /// As [`QkNorm::Heads`], after rotation (HunYuan).
    RotatedHeads,
    /// All heads of a token together (OLMo 2).
    Rows,
}
