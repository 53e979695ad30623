//! The maps from hidden states to packed query, key and value heads.

use fsdp_core::Error;
use fsdp_core::model::ParamId;

use super::config::{DecoderConfig, LatentAttention, QkNorm};
use super::layers::describe_rms_norm;
use crate::graph::{Builder, Tensor};
use crate::layer::{Attention, Describe, Layer, Linear, RmsNorm};
use crate::op::LatentDims;

/// The maps to heads.
#[derive(Clone, Debug)]
pub(super) enum Heads {
    Projected(Projected),
    Latent(Box<Latent>),
}

/// Projections of hidden states.
#[derive(Clone, Debug)]
pub(super) struct Projected {
    /// One projection each for queries, keys and values, or one for all three.
    qkv: Vec<Linear>,
    /// The number of heads, if a packed projection is ordered by head.
    by_head: Option<usize>,
    /// The norms of queries and keys.
    qk_norms: Option<[RmsNorm; 2]>,
    /// The scores of the heads' sinks.
    sinks: Option<ParamId>,
}

impl Layer for Projected {
    fn params(&self) -> Vec<ParamId> {
        let norms = self.qk_norms.iter().flatten().flat_map(RmsNorm::params);
        self.qkv.iter().flat_map(Linear::params).chain(norms).chain(self.sinks).collect()
    }
}

/// Projections to few elements, norms of these, and projections to heads.
#[derive(Clone, Debug)]
pub(super) struct Latent {
    query_down: Option<(Linear, RmsNorm)>,
    query: Linear,
    /// To the elements that keys and values are made of, and the rotating elements of keys.
    kv_down: Linear,
    kv_norm: RmsNorm,
    kv: Linear,
    dims: LatentDims,
}

/// The epsilon of the norms of latent attention, whatever the model's.
const LATENT_EPS: f64 = 1e-6;

impl Heads {
    /// Describes the maps and, after or before them, the output projection, in the open module.
    pub(super) fn describe(config: &DecoderConfig, d: &mut Describe) -> (Self, Linear) {
        let names = &config.names;
        let width = match config.latent {
            None => config.head_dim,
            Some(latent) => latent.value,
        };
        let width = config.num_attention_heads * width;
        let output = |d: &mut Describe| d.linear(names.output, width, config.hidden_size, config.output_bias);
        let first = names.output_is_first.then(|| output(d));
        let mut heads = match &config.latent {
            None => Heads::Projected(Projected::describe(config, d)),
            Some(latent) => Heads::Latent(Box::new(Latent::describe(config, latent, d))),
        };
        let output = first.unwrap_or_else(|| output(d));
        if let Heads::Projected(maps) = &mut heads {
            maps.qk_norms = describe_qk_norms(config, d);
        }
        (heads, output)
    }

    /// The number of query heads, of key heads, and of elements per head of packed rows.
    pub(super) fn sizes(config: &DecoderConfig) -> [usize; 3] {
        let heads = config.num_attention_heads;
        match &config.latent {
            None => [heads, config.num_key_value_heads, config.head_dim],
            Some(latent) => [heads, heads, latent_dims(config, latent).head_dim()],
        }
    }

    /// Returns the layers that read parameters.
    pub(super) fn layers(&self) -> Vec<&dyn Layer> {
        match self {
            Heads::Projected(maps) => vec![maps],
            Heads::Latent(latent) => latent.layers(),
        }
    }

    /// The elements of a packed head among which positions are encoded.
    pub(super) fn rotated(&self, head_dim: usize) -> usize {
        match self {
            Heads::Projected(_) => head_dim,
            Heads::Latent(latent) => latent.dims.rotating,
        }
    }

    /// Computes packed rows of queries, keys and values.
    pub(super) fn pack(&self, b: &mut Builder<'_>, h: Tensor) -> Result<Tensor, Error> {
        match self {
            Heads::Projected(maps) => maps.pack(b, h),
            Heads::Latent(latent) => latent.pack(b, h),
        }
    }

    /// Returns the output of attention over packed rows.
    pub(super) fn attend(
        &self,
        b: &mut Builder<'_>,
        qkv: Tensor,
        attention: &Attention,
    ) -> Result<Tensor, Error> {
        match self {
            Heads::Projected(maps) => {
                let sinks = maps.sinks.map(|sinks| b.repeat(sinks, attention.heads)).transpose()?;
                b.attention(qkv, sinks, attention)
            }
            Heads::Latent(latent) => {
                let mixed = b.attention(qkv, None, attention)?;
                b.unpack_latent(latent.dims, mixed)
            }
        }
    }
}

impl Projected {
    fn describe(config: &DecoderConfig, d: &mut Describe) -> Self {
        let names = &config.names;
        let [heads, kv_heads] = [config.num_attention_heads, config.num_key_value_heads];
        let sinks = config.sinks.then(|| d.weight("sinks", &[heads]));
        let widths = [heads, kv_heads, kv_heads].map(|heads| heads * config.head_dim);
        let mut map = |name: &str, width| d.linear(name, config.hidden_size, width, config.qkv_bias);
        let qkv = match names.qkv {
            [packed] => vec![map(packed, widths.iter().sum())],
            each => each.iter().zip(widths).map(|(name, width)| map(name, width)).collect(),
        };
        Self { qkv, by_head: config.qkv_by_head.then_some(heads), qk_norms: None, sinks }
    }

    fn pack(&self, b: &mut Builder<'_>, h: Tensor) -> Result<Tensor, Error> {
        let qkv = match &self.qk_norms {
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
        self.by_head.map_or(Ok(qkv), |heads| b.regroup(qkv, heads, 3))
    }
}

impl Latent {
    fn describe(config: &DecoderConfig, latent: &LatentAttention, d: &mut Describe) -> Self {
        let (hidden, bias, class) = (config.hidden_size, config.qkv_bias, config.names.class("RMSNorm"));
        let dims = latent_dims(config, latent);
        let width = dims.heads * dims.query();
        let query_down = latent.query_rank.map(|rank| {
            let map = d.linear("q_a_proj", hidden, rank, bias);
            (map, d.rms_norm("q_a_layernorm", &class, rank, LATENT_EPS))
        });
        let query = match latent.query_rank {
            None => d.linear("q_proj", hidden, width, false),
            Some(rank) => d.linear("q_b_proj", rank, width, false),
        };
        let kv_down = d.linear("kv_a_proj_with_mqa", hidden, latent.kv_rank + latent.rotating, bias);
        let kv_norm = d.rms_norm("kv_a_layernorm", &class, latent.kv_rank, LATENT_EPS);
        let kv = d.linear("kv_b_proj", latent.kv_rank, dims.heads * (dims.fixed + dims.value), false);
        Self { query_down, query, kv_down, kv_norm, kv, dims }
    }

    fn layers(&self) -> Vec<&dyn Layer> {
        let down = self.query_down.iter().flat_map(|(map, norm)| [map as &dyn Layer, norm]);
        let others = [&self.query as &dyn Layer, &self.kv_down, &self.kv_norm, &self.kv];
        down.chain(others).collect()
    }

    fn pack(&self, b: &mut Builder<'_>, h: Tensor) -> Result<Tensor, Error> {
        let queries = match &self.query_down {
            None => h,
            Some((map, norm)) => {
                let few = b.linear(h, map)?;
                b.rms_norm(few, norm)?
            }
        };
        let queries = b.linear(queries, &self.query)?;
        let few = b.linear(h, &self.kv_down)?;
        let [few, rotating] = b.split(few, [self.kv_norm.width, self.dims.rotating])?;
        let few = b.rms_norm(few, &self.kv_norm)?;
        let kv = b.linear(few, &self.kv)?;
        b.pack_latent(self.dims, [queries, rotating, kv])
    }
}

fn latent_dims(config: &DecoderConfig, latent: &LatentAttention) -> LatentDims {
    let &LatentAttention { fixed, rotating, value, interleaved, .. } = latent;
    LatentDims { rows: 0, heads: config.num_attention_heads, fixed, rotating, value, interleaved }
}

fn describe_qk_norms(config: &DecoderConfig, d: &mut Describe) -> Option<[RmsNorm; 2]> {
    let rows = [config.num_attention_heads, config.num_key_value_heads].map(|heads| heads * config.head_dim);
    config.qk_norm.map(|scope| {
        let mut norm = |name, row| {
            let width = if scope == QkNorm::Heads { config.head_dim } else { row };
            describe_rms_norm(config, name, width, d)
        };
        [norm("q_norm", rows[0]), norm("k_norm", rows[1])]
    })
}
