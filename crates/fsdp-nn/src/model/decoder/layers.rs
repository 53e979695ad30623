//! A layer of a decoder: its modules, and what its two halves compute.

use std::sync::Arc;

use fsdp_core::Error;

use super::config::{DecoderConfig, LayerConfig, QkNorm};
use super::rope::RopeConfig;
use crate::graph::{Builder, Tensor};
use crate::layer::{Attention, Describe, Layer, Linear, RmsNorm};
use crate::op::Function;

/// The modules of a layer.
#[derive(Clone, Debug)]
pub(super) struct DecoderLayer {
    before_attention: Option<RmsNorm>,
    /// To queries, keys and values; or to all of them.
    qkv: Vec<Linear>,
    /// Of queries and keys.
    qk_norms: Option<[RmsNorm; 2]>,
    rope: Option<Arc<RopeConfig>>,
    attention: Attention,
    output: Linear,
    after_attention: Option<RmsNorm>,
    before_mlp: Option<RmsNorm>,
    /// To gate and up; or to both.
    gate_up: Vec<Linear>,
    down: Linear,
    after_mlp: Option<RmsNorm>,
}

impl DecoderLayer {
    /// Describes the layer of an index.
    pub(super) fn describe(
        config: &DecoderConfig,
        layer: &LayerConfig,
        index: usize,
        d: &mut Describe,
    ) -> Self {
        let names = &config.names;
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let attention = Attention {
            dropout: config.attention_dropout,
            window: layer.window,
            ..Attention::new(heads, kv_heads, config.head_dim)
        };
        d.module(&index.to_string(), &names.class("DecoderLayer"), |d| {
            let (qkv, output, qk_norms) =
                d.module("self_attn", &names.class("Attention"), |d| describe_attention(config, d));
            let (gate_up, down) = d.module("mlp", &names.class("MLP"), |d| {
                let (bias, width) = (config.mlp_bias, 2 * inner / names.gate_up.len());
                let gate_up = names.gate_up.iter().map(|name| d.linear(name, hidden, width, bias)).collect();
                (gate_up, d.linear("down_proj", inner, hidden, bias))
            });
            let mut norm = |name: Option<&str>| {
                name.map(|name| d.rms_norm(name, &names.class("RMSNorm"), hidden, config.rms_norm_eps))
            };
            Self {
                before_attention: norm(names.before_attention),
                after_attention: norm(names.after_attention),
                before_mlp: norm(names.before_mlp),
                after_mlp: norm(names.after_mlp),
                qkv,
                qk_norms,
                rope: layer.rope.clone(),
                attention,
                output,
                gate_up,
                down,
            }
        })
    }

    /// What reads parameters in the attention half.
    pub(super) fn attention_layers(&self) -> Vec<&dyn Layer> {
        let norms = self.before_attention.iter().chain(&self.after_attention);
        let norms = norms.chain(self.qk_norms.iter().flatten()).map(|norm| norm as &dyn Layer);
        norms.chain(self.qkv.iter().chain([&self.output]).map(|map| map as &dyn Layer)).collect()
    }

    /// What reads parameters in the MLP half.
    pub(super) fn mlp_layers(&self) -> Vec<&dyn Layer> {
        let norms = self.before_mlp.iter().chain(&self.after_mlp).map(|norm| norm as &dyn Layer);
        norms.chain(self.gate_up.iter().chain([&self.down]).map(|map| map as &dyn Layer)).collect()
    }

    /// What the attention half adds.
    pub(super) fn attend(&self, b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, Error> {
        let h = normed(b, x, self.before_attention.as_ref())?;
        let mut qkv = match &self.qk_norms {
            None => b.linear_columns(h, &self.qkv)?,
            Some(norms) => {
                let mut parts = Vec::new();
                for (map, norm) in self.qkv.iter().zip(norms.iter().map(Some).chain([None])) {
                    let part = b.linear(h, map)?;
                    parts.push(match norm {
                        Some(norm) => b.rms_norm_heads(part, norm)?,
                        None => part,
                    });
                }
                b.concat(&parts)
            }
        };
        if let Some(rope) = &self.rope {
            qkv = b.rope(qkv, &self.attention, &rope.rope(self.attention.head_dim, b.batch().1))?;
        }
        let mixed = b.attention(qkv, &self.attention)?;
        let y = b.linear(mixed, &self.output)?;
        normed(b, y, self.after_attention.as_ref())
    }

    /// What the MLP half adds.
    pub(super) fn transform(
        &self,
        b: &mut Builder<'_>,
        x: Tensor,
        activation: Function,
    ) -> Result<Tensor, Error> {
        let h = normed(b, x, self.before_mlp.as_ref())?;
        let [gate, up] = match &self.gate_up[..] {
            [gate, up] => b.linear_pair(h, gate, up)?,
            packed => {
                let both = b.linear_columns(h, packed)?;
                b.halves(both)?
            }
        };
        let inner = b.gated(activation, gate, up)?;
        let y = b.linear(inner, &self.down)?;
        normed(b, y, self.after_mlp.as_ref())
    }
}

/// The projections of attention, and the norms of queries and keys.
fn describe_attention(
    config: &DecoderConfig,
    d: &mut Describe,
) -> (Vec<Linear>, Linear, Option<[RmsNorm; 2]>) {
    let names = &config.names;
    let [heads, kv_heads] = [config.num_attention_heads, config.num_key_value_heads];
    let widths = [heads, kv_heads, kv_heads].map(|heads| heads * config.head_dim);
    let output = |d: &mut Describe| d.linear("o_proj", widths[0], config.hidden_size, config.output_bias);
    let first = names.output_is_first.then(|| output(d));
    let mut map = |name: &str, width| d.linear(name, config.hidden_size, width, config.qkv_bias);
    let qkv = match names.qkv {
        [packed] => vec![map(packed, widths.iter().sum())],
        each => each.iter().zip(widths).map(|(name, width)| map(name, width)).collect(),
    };
    let output = first.unwrap_or_else(|| output(d));
    let qk_norms = config.qk_norm.map(|over| {
        let mut norm = |name, row| {
            let width = if over == QkNorm::Heads { config.head_dim } else { row };
            d.rms_norm(name, &names.class("RMSNorm"), width, config.rms_norm_eps)
        };
        [norm("q_norm", widths[0]), norm("k_norm", widths[1])]
    });
    (qkv, output, qk_norms)
}

fn normed(b: &mut Builder<'_>, x: Tensor, norm: Option<&RmsNorm>) -> Result<Tensor, Error> {
    norm.map_or(Ok(x), |norm| b.rms_norm(x, norm))
}
