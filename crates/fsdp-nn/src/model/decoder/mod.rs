//! Decoders: layers of attention with rotary positions and an MLP.
//!
//! Llama and its relatives share one architecture. Their differences (names, biases, kinds and places of norms, norms
//! of queries and keys, packed weights, per-layer rotation, caps and scales) are data: a [`DecoderConfig`].

mod attention;
mod config;
mod delta;
mod layers;
mod mixture;
mod mlp;
mod names;
mod rope;

use fsdp_core::model::BlockId;
use fsdp_core::{DType, Error};
use half::{bf16, f16};

pub use config::{
    DecoderConfig, DeltaNet, LatentAttention, LayerConfig, Mixture, NormKind, PackedExperts, QkNorm,
    SharedExpert,
};
pub use names::{Names, NormsPlace};
pub use rope::{RopeConfig, RopeScaling, Yarn};

use super::architecture::Architecture;
use crate::graph::{Builder, Tensor};
use crate::layer::{Describe, Description, Embedding, Head, Layer, Norm};
use layers::{DecoderLayer, describe_norm};

/// A decoder.
#[derive(Clone, Debug)]
pub struct Decoder {
    description: Description,
    embedding: Embedding,
    embedding_scale: f64,
    embedding_scale_rounds: bool,
    embedding_dropout: f64,
    layers: Vec<DecoderLayer>,
    is_parallel: bool,
    residual_dropout: f64,
    residual_scale: f64,
    logit_scale: f64,
    norm: Norm,
    head: Head,
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
        let (embedding, layers, norm) = describe.module(names.model, &names.class("Model"), |d| {
            let embedding =
                d.padded_embedding(names.embedding, config.vocab_size, hidden, config.padding_row);
            let layers: Vec<_> = d.module("layers", "ModuleList", |d| {
                let layers = config.layers.iter().enumerate();
                layers.map(|(i, layer)| DecoderLayer::describe(config, layer, i, d)).collect()
            });
            (embedding, layers, describe_norm(config, names.last_norm, d))
        });
        let tied = config.tie_word_embeddings.then_some(&embedding);
        let head = describe.head(names.head, hidden, config.vocab_size, tied);
        let head = Head { softcap: config.logit_softcap, ..head };
        describe.block("embedding", None, &[&embedding]);
        for (i, layer) in layers.iter().enumerate() {
            let [attention, mlp] = [layer.attention_layers(), layer.mlp_layers()];
            if config.is_parallel {
                let both: Vec<&dyn Layer> = attention.into_iter().chain(mlp).collect();
                describe.block(&format!("layers.{i}"), Some(i), &both);
            } else {
                describe.block(&format!("layers.{i}.attention"), Some(i), &attention);
                describe.block(&format!("layers.{i}.mlp"), Some(i), &mlp);
            }
            if let Some(mixture) = config.layers[i].mixture {
                describe.mixture(mixture.experts, layer.score_bias());
            }
        }
        describe.block("head", None, &[&norm, &head]);
        describe.router_loss(config.router_loss);
        describe.keep_f32(config.keep_f32);
        Ok(Self {
            description: describe.finish()?,
            embedding,
            embedding_scale: config.embedding_scale,
            embedding_scale_rounds: config.embedding_scale_rounds,
            embedding_dropout: config.embedding_dropout,
            layers,
            is_parallel: config.is_parallel,
            residual_dropout: config.residual_dropout,
            residual_scale: config.residual_scale,
            logit_scale: config.logit_scale,
            norm,
            head,
        })
    }

    /// What is added of the output of a half of a layer.
    fn added(&self, b: &mut Builder<'_>, y: Tensor) -> Tensor {
        let y = b.dropout(y, self.residual_dropout);
        b.scale(y, self.residual_scale)
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
        let x = b.embedding(&self.embedding)?;
        let scale = self.embedding_scale as f32;
        let scale = match b.dtype() {
            _ if !self.embedding_scale_rounds => scale.into(),
            DType::Bf16 => bf16::from_f32(scale).to_f64(),
            DType::F16 => f16::from_f32(scale).to_f64(),
            _ => scale.into(),
        };
        let x = b.scale(x, scale);
        Ok(b.dropout(x, self.embedding_dropout))
    }

    fn middle(&self, block: BlockId, b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, Error> {
        if self.is_parallel {
            let layer = &self.layers[block.0 - 1];
            let [attended, transformed] = layer.in_parallel(b, x)?.map(|y| self.added(b, y));
            let both = b.add(transformed, attended)?;
            return b.add(both, x);
        }
        let layer = &self.layers[(block.0 - 1) / 2];
        let is_attention = block.0 % 2 == 1;
        let y = if is_attention { layer.attend(b, x)? } else { layer.transform(b, x)? };
        let y = self.added(b, y);
        b.add(x, y)
    }

    fn last(&self, b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, Error> {
        let x = b.norm(x, &self.norm)?;
        Ok(b.scale(x, self.logit_scale))
    }
}
