//! GPT-2: learned positions, layer norms, GELU in the tanh form, and a tied head.
//!
//! Modules and parameters are those of transformers' `GPT2LMHeadModel`, whose linear maps are `Conv1D`
//! (weights stored `inputs x outputs`).

use fsdp_core::Error;
use fsdp_core::model::BlockId;

use super::architecture::Architecture;
use crate::graph::{Builder, Tensor};
use crate::layer::{Attention, Describe, Description, Embedding, Head, LayerNorm, Linear};
use crate::op::Function;

/// The sizes of a GPT-2.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpt2Config {
    /// Vocabulary size.
    pub vocab_size: usize,
    /// Rows of the position table.
    pub n_positions: usize,
    /// Elements per hidden state.
    pub n_embd: usize,
    /// Number of layers.
    pub n_layer: usize,
    /// Number of heads; divides `n_embd`.
    pub n_head: usize,
    /// Inner width of the MLP.
    pub n_inner: usize,
    /// Added to variances.
    pub layer_norm_epsilon: f64,
    /// Dropout rate of embeddings.
    pub embd_pdrop: f64,
    /// Dropout rate of attention weights.
    pub attn_pdrop: f64,
    /// Dropout rate of the output of each half of a layer.
    pub resid_pdrop: f64,
    /// Whether the output head shares the embedding table.
    pub tie_word_embeddings: bool,
    /// Standard deviation of initial weights.
    pub initializer_range: f64,
}

/// A GPT-2.
#[derive(Clone, Debug)]
pub struct Gpt2 {
    description: Description,
    tokens: Embedding,
    positions: Embedding,
    layers: Vec<Gpt2Layer>,
    norm: LayerNorm,
    head: Head,
    attention: Attention,
    embedding_dropout: f64,
    residual_dropout: f64,
}

#[derive(Clone, Debug)]
struct Gpt2Layer {
    attention_norm: LayerNorm,
    qkv: Linear,
    output: Linear,
    mlp_norm: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Gpt2 {
    /// Describes a GPT-2.
    ///
    /// # Errors
    /// [`Error::Model`] when a size is zero.
    pub fn new(config: &Gpt2Config) -> Result<Self, Error> {
        let mut describe = Describe::new("GPT2LMHeadModel", config.initializer_range);
        let hidden = config.n_embd;
        let (tokens, positions, layers, norm) = describe.module("transformer", "GPT2Model", |d| {
            let tokens = d.embedding("wte", config.vocab_size, hidden);
            let positions = d.embedding("wpe", config.n_positions, hidden);
            d.module("drop", "Dropout", |_| ());
            let layers = d.module("h", "ModuleList", |d| {
                (0..config.n_layer).map(|i| Gpt2Layer::describe(config, i, d)).collect::<Vec<_>>()
            });
            (tokens, positions, layers, d.layer_norm("ln_f", hidden, config.layer_norm_epsilon))
        });
        let tied = config.tie_word_embeddings.then_some(&tokens);
        let head = describe.head("lm_head", hidden, config.vocab_size, tied);
        describe.block("embedding", None, &[&tokens, &positions]);
        for (i, layer) in layers.iter().enumerate() {
            let Gpt2Layer { attention_norm, qkv, output, mlp_norm, up, down } = layer;
            describe.block(&format!("layers.{i}.attention"), Some(i), &[attention_norm, qkv, output]);
            describe.block(&format!("layers.{i}.mlp"), Some(i), &[mlp_norm, up, down]);
        }
        describe.block("head", None, &[&norm, &head]);
        Ok(Self {
            description: describe.finish()?,
            tokens,
            positions,
            layers,
            norm,
            head,
            attention: Attention {
                dropout: config.attn_pdrop,
                ..Attention::new(config.n_head, config.n_head, hidden / config.n_head)
            },
            embedding_dropout: config.embd_pdrop,
            residual_dropout: config.resid_pdrop,
        })
    }
}

impl Gpt2Layer {
    fn describe(config: &Gpt2Config, index: usize, d: &mut Describe) -> Self {
        let (hidden, eps, std) = (config.n_embd, config.layer_norm_epsilon, config.initializer_range);
        // Projections into the residual stream start smaller, so that its variance does not grow with depth.
        let residual_std = std / ((2 * config.n_layer) as f64).sqrt();
        d.module(&index.to_string(), "GPT2Block", |d| {
            let attention_norm = d.layer_norm("ln_1", hidden, eps);
            let (qkv, output) = d.module("attn", "GPT2Attention", |d| {
                let parts = (
                    d.conv1d("c_attn", hidden, 3 * hidden, std),
                    d.conv1d("c_proj", hidden, hidden, residual_std),
                );
                d.module("attn_dropout", "Dropout", |_| ());
                d.module("resid_dropout", "Dropout", |_| ());
                parts
            });
            let mlp_norm = d.layer_norm("ln_2", hidden, eps);
            let (up, down) = d.module("mlp", "GPT2MLP", |d| {
                let parts = (
                    d.conv1d("c_fc", hidden, config.n_inner, std),
                    d.conv1d("c_proj", config.n_inner, hidden, residual_std),
                );
                d.module("dropout", "Dropout", |_| ());
                parts
            });
            Self { attention_norm, qkv, output, mlp_norm, up, down }
        })
    }
}

impl Architecture for Gpt2 {
    fn description(&self) -> &Description {
        &self.description
    }

    fn head(&self) -> Head {
        self.head
    }

    fn positions_max(&self) -> Option<usize> {
        Some(self.positions.rows)
    }

    fn first(&self, b: &mut Builder<'_>) -> Result<Tensor, Error> {
        let x = b.embedding(&self.tokens)?;
        let x = b.add_positions(x, &self.positions)?;
        Ok(b.dropout(x, self.embedding_dropout))
    }

    fn middle(&self, block: BlockId, b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, Error> {
        let layer = &self.layers[(block.0 - 1) / 2];
        let is_attention = block.0 % 2 == 1;
        let y = if is_attention {
            let h = b.layer_norm(x, &layer.attention_norm)?;
            let qkv = b.linear(h, &layer.qkv)?;
            let mixed = b.attention(qkv, None, &self.attention)?;
            b.linear(mixed, &layer.output)?
        } else {
            let h = b.layer_norm(x, &layer.mlp_norm)?;
            let h = b.linear(h, &layer.up)?;
            let h = b.activation(Function::GeluTanh, h);
            b.linear(h, &layer.down)?
        };
        let y = b.dropout(y, self.residual_dropout);
        b.add(x, y)
    }

    fn last(&self, b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, Error> {
        b.layer_norm(x, &self.norm)
    }
}
