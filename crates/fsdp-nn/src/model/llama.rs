//! Llama: grouped-query attention with rotary positions, RMS norms and SwiGLU.
//!
//! Modules and parameters are those of transformers' `LlamaForCausalLM`.

use fsdp_core::Error;
use fsdp_core::model::BlockId;

use super::architecture::Architecture;
use crate::graph::{Builder, Tensor};
use crate::layer::{Attention, Describe, Description, Embedding, Head, Linear, RmsNorm, Rope};
use crate::op::Function;

/// The sizes of a Llama.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// Tokens.
    pub vocab_size: usize,
    /// Elements of a hidden state.
    pub hidden_size: usize,
    /// Elements between the two halves of the MLP.
    pub intermediate_size: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key/value heads; divides the query heads.
    pub num_key_value_heads: usize,
    /// Elements of a head; even.
    pub head_dim: usize,
    /// Added to mean squares.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Whether the output head is the embedding.
    pub tie_word_embeddings: bool,
    /// Whether the projections of attention have biases.
    pub attention_bias: bool,
    /// Whether the projections of the MLP have biases.
    pub mlp_bias: bool,
    /// Probability of dropping an attention weight.
    pub attention_dropout: f64,
    /// Deviation of initial weights.
    pub initializer_range: f64,
    /// The positions it was made for; nothing depends on it.
    pub max_position_embeddings: usize,
}

/// A Llama.
#[derive(Clone, Debug)]
pub struct Llama {
    description: Description,
    embedding: Embedding,
    layers: Vec<LlamaLayer>,
    norm: RmsNorm,
    head: Head,
    attention: Attention,
    rope: Rope,
}

#[derive(Clone, Debug)]
struct LlamaLayer {
    qkv: [Linear; 3],
    output: Linear,
    gate: Linear,
    up: Linear,
    down: Linear,
    attention_norm: RmsNorm,
    mlp_norm: RmsNorm,
}

const NORM: &str = "LlamaRMSNorm";

impl Llama {
    /// Describes a Llama.
    ///
    /// # Errors
    /// [`Error::Model`] when a size is zero.
    pub fn new(config: &LlamaConfig) -> Result<Self, Error> {
        let mut describe = Describe::new("LlamaForCausalLM", config.initializer_range);
        let hidden = config.hidden_size;
        let (embedding, layers, norm) = describe.module("model", "LlamaModel", |d| {
            let embedding = d.embedding("embed_tokens", config.vocab_size, hidden);
            let layers = d.module("layers", "ModuleList", |d| {
                (0..config.num_hidden_layers).map(|i| LlamaLayer::describe(config, i, d)).collect::<Vec<_>>()
            });
            (embedding, layers, d.rms_norm("norm", NORM, hidden, config.rms_norm_eps))
        });
        let tied = config.tie_word_embeddings.then_some(&embedding);
        let head = describe.head("lm_head", hidden, config.vocab_size, tied);
        describe.block("embedding", None, &[&embedding]);
        for (i, layer) in layers.iter().enumerate() {
            let LlamaLayer { qkv: [q, k, v], output, gate, up, down, attention_norm, mlp_norm } = layer;
            describe.block(&format!("layers.{i}.attention"), Some(i), &[attention_norm, q, k, v, output]);
            describe.block(&format!("layers.{i}.mlp"), Some(i), &[mlp_norm, gate, up, down]);
        }
        describe.block("head", None, &[&norm, &head]);
        let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let attention = Attention {
            dropout: config.attention_dropout,
            ..Attention::new(heads, kv_heads, config.head_dim)
        };
        let rope = Rope::new(config.rope_theta, config.head_dim);
        Ok(Self { description: describe.finish()?, embedding, layers, norm, head, attention, rope })
    }
}

impl LlamaLayer {
    fn describe(config: &LlamaConfig, index: usize, d: &mut Describe) -> Self {
        let (hidden, inner, eps) = (config.hidden_size, config.intermediate_size, config.rms_norm_eps);
        let queries = config.num_attention_heads * config.head_dim;
        let keys = config.num_key_value_heads * config.head_dim;
        d.module(&index.to_string(), "LlamaDecoderLayer", |d| {
            let bias = config.attention_bias;
            let (qkv, output) = d.module("self_attn", "LlamaAttention", |d| {
                let qkv = [("q_proj", queries), ("k_proj", keys), ("v_proj", keys)]
                    .map(|(name, outputs)| d.linear(name, hidden, outputs, bias));
                (qkv, d.linear("o_proj", queries, hidden, bias))
            });
            let bias = config.mlp_bias;
            let (gate, up, down) = d.module("mlp", "LlamaMLP", |d| {
                let gate = d.linear("gate_proj", hidden, inner, bias);
                let up = d.linear("up_proj", hidden, inner, bias);
                (gate, up, d.linear("down_proj", inner, hidden, bias))
            });
            let attention_norm = d.rms_norm("input_layernorm", NORM, hidden, eps);
            let mlp_norm = d.rms_norm("post_attention_layernorm", NORM, hidden, eps);
            Self { qkv, output, gate, up, down, attention_norm, mlp_norm }
        })
    }
}

impl Architecture for Llama {
    fn description(&self) -> &Description {
        &self.description
    }

    fn head(&self) -> Head {
        self.head
    }

    fn first(&self, b: &mut Builder<'_>) -> Result<Tensor, Error> {
        b.embedding(&self.embedding)
    }

    fn middle(&self, block: BlockId, b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, Error> {
        let layer = &self.layers[(block.0 - 1) / 2];
        let is_attention = block.0 % 2 == 1;
        if is_attention {
            let h = b.rms_norm(x, &layer.attention_norm)?;
            let qkv = b.linear_columns(h, &layer.qkv)?;
            let qkv = b.rope(qkv, &self.attention, &self.rope)?;
            let mixed = b.attention(qkv, &self.attention)?;
            let y = b.linear(mixed, &layer.output)?;
            b.add(x, y)
        } else {
            let h = b.rms_norm(x, &layer.mlp_norm)?;
            let [gate, up] = b.linear_pair(h, &layer.gate, &layer.up)?;
            let inner = b.gated(Function::Silu, gate, up)?;
            let y = b.linear(inner, &layer.down)?;
            b.add(x, y)
        }
    }

    fn last(&self, b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, Error> {
        b.rms_norm(x, &self.norm)
    }
}
