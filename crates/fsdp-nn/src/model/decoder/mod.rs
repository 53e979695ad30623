//! Decoders: grouped-query attention with rotary positions, RMS norms and gated MLPs.
//!
//! Llama and the families that follow it are one architecture here. What tells them apart (names, biases, where norms
//! stand, norms of queries and keys, packed weights, rotation by layer) is data: a [`DecoderConfig`].

mod config;
mod layers;
mod names;
mod rope;

use fsdp_core::Error;
use fsdp_core::model::BlockId;

pub use config::{DecoderConfig, LayerConfig, QkNorm};
pub use names::Names;
pub use rope::{RopeConfig, RopeScaling, Yarn};

use super::architecture::Architecture;
use crate::graph::{Builder, Tensor};
use crate::layer::{Describe, Description, Embedding, Head, RmsNorm};
use crate::op::Function;
use layers::DecoderLayer;

/// A decoder.
#[derive(Clone, Debug)]
pub struct Decoder {
    description: Description,
    embedding: Embedding,
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    head: Head,
    activation: Function,
    residual_dropout: f64,
}

impl Decoder {
    /// Describes a decoder.
    ///
    /// # Errors
    /// [`Error::Model`] when a size is zero.
    pub fn new(config: &DecoderConfig) -> Result<Self, Error> {
        let names = &config.names;
        let mut describe = Describe::new(&names.class("ForCausalLM"), config.initializer_range);
        let hidden = config.hidden_size;
        let (embedding, layers, norm) = describe.module("model", &names.class("Model"), |d| {
            let embedding = d.embedding("embed_tokens", config.vocab_size, hidden);
            let layers: Vec<_> = d.module("layers", "ModuleList", |d| {
                let layers = config.layers.iter().enumerate();
                layers.map(|(i, layer)| DecoderLayer::describe(config, layer, i, d)).collect()
            });
            (embedding, layers, d.rms_norm("norm", &names.class("RMSNorm"), hidden, config.rms_norm_eps))
        });
        let tied = config.tie_word_embeddings.then_some(&embedding);
        let head = describe.head("lm_head", hidden, config.vocab_size, tied);
        describe.block("embedding", None, &[&embedding]);
        for (i, layer) in layers.iter().enumerate() {
            describe.block(&format!("layers.{i}.attention"), Some(i), &layer.attention_layers());
            describe.block(&format!("layers.{i}.mlp"), Some(i), &layer.mlp_layers());
        }
        describe.block("head", None, &[&norm, &head]);
        Ok(Self {
            description: describe.finish()?,
            embedding,
            layers,
            norm,
            head,
            activation: config.activation,
            residual_dropout: config.residual_dropout,
        })
    }
}

impl Architecture for Decoder {
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
        let y = if is_attention { layer.attend(b, x)? } else { layer.transform(b, x, self.activation)? };
        let y = b.dropout(y, self.residual_dropout);
        b.add(x, y)
    }

    fn last(&self, b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, Error> {
        b.rms_norm(x, &self.norm)
    }
}
