//! A layer of a decoder: its modules, and the computation of its two halves.

use std::sync::Arc;

use fsdp_core::Error;

use super::config::{DecoderConfig, LayerConfig, NormKind, QkNorm};
use super::mixture::Experts;
use super::rope::RopeConfig;
use crate::graph::{Builder, Tensor};
use crate::layer::{Attention, Describe, Layer, Linear, Norm, RmsNorm};
use crate::op::Function;

/// The modules of a layer.
#[derive(Clone, Debug)]
pub(super) struct DecoderLayer {
    norms: Norms,
    /// One projection each for queries, keys and values, or one for all three.
    qkv: Vec<Linear>,
    qkv_by_head: bool,
    /// The norms of queries and keys.
    qk_norms: Option<[RmsNorm; 2]>,
    rope: Option<Arc<RopeConfig>>,
    attention: Attention,
    output: Linear,
    transform: Transform,
}

/// The second half of a layer.
#[derive(Clone, Debug)]
enum Transform {
    Mlp(Mlp),
    Experts(Experts),
}

/// The norms before and after the two halves.
#[derive(Clone, Debug)]
struct Norms {
    before_attention: Option<Norm>,
    after_attention: Option<Norm>,
    before_mlp: Option<Norm>,
    after_mlp: Option<Norm>,
}

/// The modules of an MLP.
#[derive(Clone, Debug)]
struct Mlp {
    /// Projections to gate and up; or one to both; or the only one.
    gate_up: Vec<Linear>,
    is_gated: bool,
    activation: Function,
    down: Linear,
}

impl DecoderLayer {
    /// Describes the layer at `index`.
    pub(super) fn describe(
        config: &DecoderConfig,
        layer: &LayerConfig,
        index: usize,
        d: &mut Describe,
    ) -> Self {
        let names = &config.names;
        let attention = Attention {
            dropout: config.attention_dropout,
            scale: config.attention_scale,
            softcap: config.attention_softcap,
            window: layer.window,
            ..Attention::new(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        };
        d.module(&index.to_string(), &names.class(names.layer_class), |d| {
            let first = names.norms_are_first.then(|| Norms::describe(config, d));
            let (qkv, output, qk_norms) =
                d.module(names.attention, &names.class("Attention"), |d| describe_attention(config, d));
            let transform = d.module(names.mlp, &names.class("MLP"), |d| match &layer.mixture {
                None => Transform::Mlp(Mlp::describe(config, d)),
                Some(mixture) => Transform::Experts(Experts::describe(config, mixture, d)),
            });
            Self {
                norms: first.unwrap_or_else(|| Norms::describe(config, d)),
                qkv,
                qkv_by_head: config.qkv_by_head,
                qk_norms,
                rope: layer.rope.clone(),
                attention,
                output,
                transform,
            }
        })
    }

    /// Returns the layers that read parameters in the attention half.
    pub(super) fn attention_layers(&self) -> Vec<&dyn Layer> {
        let norms = self.norms.before_attention.iter().chain(&self.norms.after_attention);
        let norms = norms.map(|norm| norm as &dyn Layer);
        let norms = norms.chain(self.qk_norms.iter().flatten().map(|norm| norm as &dyn Layer));
        norms.chain(self.qkv.iter().chain([&self.output]).map(|map| map as &dyn Layer)).collect()
    }

    /// Returns the layers that read parameters in the MLP half.
    pub(super) fn mlp_layers(&self) -> Vec<&dyn Layer> {
        let norms = self.norms.before_mlp.iter().chain(&self.norms.after_mlp);
        let maps = match &self.transform {
            Transform::Mlp(mlp) => {
                mlp.gate_up.iter().chain([&mlp.down]).map(|map| map as &dyn Layer).collect()
            }
            Transform::Experts(experts) => experts.layers().to_vec(),
        };
        norms.map(|norm| norm as &dyn Layer).chain(maps).collect()
    }

    /// Computes what the attention half adds.
    pub(super) fn attend(&self, b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, Error> {
        let h = normed(b, x, self.norms.before_attention.as_ref())?;
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
        if self.qkv_by_head {
            qkv = b.regroup(qkv, self.attention.heads, 3)?;
        }
        if let Some(rope) = &self.rope {
            qkv = b.rope(qkv, &self.attention, &rope.rope(self.attention.head_dim, b.length()))?;
        }
        let mixed = b.attention(qkv, &self.attention)?;
        let y = b.linear(mixed, &self.output)?;
        normed(b, y, self.norms.after_attention.as_ref())
    }

    /// Computes what the MLP half adds.
    pub(super) fn transform(&self, b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, Error> {
        let h = normed(b, x, self.norms.before_mlp.as_ref())?;
        let y = match &self.transform {
            Transform::Mlp(mlp) => mlp.transform(b, h)?,
            Transform::Experts(experts) => experts.transform(b, h)?,
        };
        normed(b, y, self.norms.after_mlp.as_ref())
    }
}

impl Norms {
    fn describe(config: &DecoderConfig, d: &mut Describe) -> Self {
        let names = &config.names;
        let mut norm = |name: Option<&str>| name.map(|name| describe_norm(config, name, d));
        Self {
            before_attention: norm(names.before_attention),
            after_attention: norm(names.after_attention),
            before_mlp: norm(names.before_mlp),
            after_mlp: norm(names.after_mlp),
        }
    }
}

impl Mlp {
    fn describe(config: &DecoderConfig, d: &mut Describe) -> Self {
        let (hidden, inner, bias) = (config.hidden_size, config.intermediate_size, config.mlp_bias);
        let names = &config.names;
        let width = (1 + usize::from(config.is_gated)) * inner / names.gate_up.len();
        Self {
            gate_up: names.gate_up.iter().map(|name| d.linear(name, hidden, width, bias)).collect(),
            is_gated: config.is_gated,
            activation: config.activation,
            down: d.linear(names.down, inner, hidden, bias),
        }
    }

    fn transform(&self, b: &mut Builder<'_>, h: Tensor) -> Result<Tensor, Error> {
        let inner = match &self.gate_up[..] {
            [gate, up] => {
                let [gate, up] = b.linear_pair(h, gate, up)?;
                b.gated(self.activation, gate, up)?
            }
            maps => {
                let all = b.linear_columns(h, maps)?;
                if self.is_gated {
                    let [gate, up] = b.split(all, [all.width() / 2; 2])?;
                    b.gated(self.activation, gate, up)?
                } else {
                    b.activation(self.activation, all)
                }
            }
        };
        b.linear(inner, &self.down)
    }
}

/// Describes the projections of attention, and the norms of queries and keys.
fn describe_attention(
    config: &DecoderConfig,
    d: &mut Describe,
) -> (Vec<Linear>, Linear, Option<[RmsNorm; 2]>) {
    let names = &config.names;
    let [heads, kv_heads] = [config.num_attention_heads, config.num_key_value_heads];
    let widths = [heads, kv_heads, kv_heads].map(|heads| heads * config.head_dim);
    let output = |d: &mut Describe| d.linear(names.output, widths[0], config.hidden_size, config.output_bias);
    let first = names.output_is_first.then(|| output(d));
    let mut map = |name: &str, width| d.linear(name, config.hidden_size, width, config.qkv_bias);
    let qkv = match names.qkv {
        [packed] => vec![map(packed, widths.iter().sum())],
        each => each.iter().zip(widths).map(|(name, width)| map(name, width)).collect(),
    };
    let output = first.unwrap_or_else(|| output(d));
    let qk_norms = config.qk_norm.map(|scope| {
        let mut norm = |name, row| {
            let width = if scope == QkNorm::Heads { config.head_dim } else { row };
            describe_rms_norm(config, name, width, d)
        };
        [norm("q_norm", widths[0]), norm("k_norm", widths[1])]
    });
    (qkv, output, qk_norms)
}

/// Describes a norm of hidden states.
pub(super) fn describe_norm(config: &DecoderConfig, name: &str, d: &mut Describe) -> Norm {
    match config.norm {
        NormKind::Layer => Norm::Layer(d.layer_norm(name, config.hidden_size, config.norm_eps)),
        _ => Norm::Rms(describe_rms_norm(config, name, config.hidden_size, d)),
    }
}

fn describe_rms_norm(config: &DecoderConfig, name: &str, width: usize, d: &mut Describe) -> RmsNorm {
    let (class, eps) = (config.names.class("RMSNorm"), config.norm_eps);
    match config.norm {
        NormKind::CentredRms => d.centred_rms_norm(name, &class, width, eps),
        _ => d.rms_norm(name, &class, width, eps),
    }
}

fn normed(b: &mut Builder<'_>, x: Tensor, norm: Option<&Norm>) -> Result<Tensor, Error> {
    norm.map_or(Ok(x), |norm| b.norm(x, norm))
}
