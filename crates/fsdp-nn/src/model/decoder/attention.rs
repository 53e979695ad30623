//! The attention of a layer: maps from hidden states to packed query, key and value heads, their rotation and norms, and the
//! output projection.

use std::sync::Arc;

use fsdp_core::Error;
use fsdp_core::model::ParamId;

use super::config::{DecoderConfig, LatentAttention, LayerConfig, QkNorm};
use super::layers::describe_rms_norm;
use super::rope::RopeConfig;
use crate::graph::{Builder, Tensor};
use crate::layer::{Attention, Describe, Layer, Linear, RmsNorm};
use crate::op::{Function, LatentDims};

/// The modules of attention.
#[derive(Clone, Debug)]
pub(super) struct SelfAttention {
    maps: Maps,
    rope: Option<Arc<RopeConfig>>,
    heads: Attention,
    output: Linear,
}

/// The maps to heads.
#[derive(Clone, Debug)]
enum Maps {
    Projected(Projected),
    Latent(Box<Latent>),
}

/// Projections of hidden states.
#[derive(Clone, Debug)]
struct Projected {
    /// One projection each for queries, keys and values, or one for all three.
    qkv: Vec<Linear>,
    /// The number of heads, if a packed projection is ordered by head.
    by_head: Option<usize>,
    /// The norms of queries and keys.
    qk_norms: Option<[RmsNorm; 2]>,
    /// Whether these come after rotation.
    norms_follow_rotation: bool,
    /// The number of elements of a head that rotate with their neighbor, if some do, so that heads are reordered first.
    neighbors: Option<usize>,
    /// The scores of the heads' sinks.
    sinks: Option<ParamId>,
    /// Whether each query comes with a gate.
    gated: bool,
}

impl Layer for Projected {
    fn params(&self) -> Vec<ParamId> {
        let norms = self.qk_norms.iter().flatten().flat_map(RmsNorm::params);
        self.qkv.iter().flat_map(Linear::params).chain(norms).chain(self.sinks).collect()
    }
}

/// Projections to few elements, norms of these, and projections to heads.
#[derive(Clone, Debug)]
struct Latent {
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

impl SelfAttention {
    /// Describes the attention of a layer, in the open module.
    pub(super) fn describe(config: &DecoderConfig, layer: &LayerConfig, d: &mut Describe) -> Self {
        let (names, query_heads) = (&config.names, config.num_attention_heads);
        let (kv_heads, head_dim, value_dim) = match &config.latent {
            None => (config.num_key_value_heads, config.head_dim, config.head_dim),
            Some(latent) => (query_heads, latent_dims(config, latent).head_dim(), latent.value),
        };
        let width = query_heads * value_dim;
        let output = |d: &mut Describe| d.linear(names.output, width, config.hidden_size, config.output_bias);
        let first = names.output_is_first.then(|| output(d));
        let mut maps = match &config.latent {
            None => Maps::Projected(Projected::describe(config, layer, d)),
            Some(latent) => Maps::Latent(Box::new(Latent::describe(config, latent, d))),
        };
        let output = first.unwrap_or_else(|| output(d));
        if let Maps::Projected(maps) = &mut maps {
            maps.qk_norms = describe_qk_norms(config, d);
        }
        let heads = Attention {
            dropout: config.attention_dropout,
            scale: config.attention_scale,
            softcap: config.attention_softcap,
            window: layer.window,
            ..Attention::new(query_heads, kv_heads, head_dim)
        };
        Self { maps, rope: layer.rope.clone(), heads, output }
    }

    /// Returns the layers that read parameters.
    pub(super) fn layers(&self) -> Vec<&dyn Layer> {
        let maps = match &self.maps {
            Maps::Projected(maps) => vec![maps as &dyn Layer],
            Maps::Latent(latent) => latent.layers(),
        };
        maps.into_iter().chain([&self.output as &dyn Layer]).collect()
    }

    /// Returns the output projection of what rows attend to.
    pub(super) fn attend(&self, b: &mut Builder<'_>, h: Tensor) -> Result<Tensor, Error> {
        let mixed = match &self.maps {
            Maps::Projected(maps) => {
                let (qkv, gate) = maps.pack(b, h, &self.heads)?;
                let qkv = self.rotate(b, qkv, self.heads.head_dim)?;
                let qkv = maps.normed_after(b, qkv, &self.heads)?;
                let sinks = maps.sinks.map(|sinks| b.repeat(sinks, self.heads.heads)).transpose()?;
                let mixed = b.attention(qkv, sinks, &self.heads)?;
                gate.map_or(Ok(mixed), |gate| b.gated(Function::Logistic, gate, mixed))?
            }
            Maps::Latent(latent) => {
                let qkv = latent.pack(b, h)?;
                let qkv = self.rotate(b, qkv, latent.dims.rotating)?;
                let mixed = b.attention(qkv, None, &self.heads)?;
                b.unpack_latent(latent.dims, mixed)?
            }
        };
        b.linear(mixed, &self.output)
    }

    /// Rotates the first elements of query and key heads, those among which positions are encoded.
    fn rotate(&self, b: &mut Builder<'_>, qkv: Tensor, elements: usize) -> Result<Tensor, Error> {
        let Some(rope) = &self.rope else { return Ok(qkv) };
        b.rope(qkv, &self.heads, &rope.rope(elements, b.length()))
    }
}

impl Projected {
    fn describe(config: &DecoderConfig, layer: &LayerConfig, d: &mut Describe) -> Self {
        let names = &config.names;
        let [heads, kv_heads] = [config.num_attention_heads, config.num_key_value_heads];
        let sinks = config.sinks.then(|| d.weight("sinks", &[heads]));
        let gated = config.attention_gate;
        let of_queries = heads * (1 + usize::from(gated));
        let widths = [of_queries, kv_heads, kv_heads].map(|heads| heads * config.head_dim);
        let mut map = |name: &str, width| d.linear(name, config.hidden_size, width, config.qkv_bias);
        let qkv = match names.qkv {
            [packed] => vec![map(packed, widths.iter().sum())],
            each => each.iter().zip(widths).map(|(name, width)| map(name, width)).collect(),
        };
        let rotating = layer.rope.as_ref().map(|rope| rope.rotary_dim(config.head_dim));
        let neighbors = rotating.filter(|_| config.rotates_neighbors);
        let norms_follow_rotation = config.qk_norm == Some(QkNorm::RotatedHeads);
        let by_head = config.qkv_by_head.then_some(heads);
        Self { qkv, by_head, qk_norms: None, norms_follow_rotation, neighbors, sinks, gated }
    }

    /// Computes packed queries, keys and values, with norms and in the order of rotation; and the gates of queries, if they
    /// have some.
    fn pack(
        &self,
        b: &mut Builder<'_>,
        h: Tensor,
        heads: &Attention,
    ) -> Result<(Tensor, Option<Tensor>), Error> {
        let norms = self.qk_norms.as_ref().filter(|_| !self.norms_follow_rotation);
        if norms.is_none() && self.neighbors.is_none() && !self.gated {
            let qkv = b.linear_columns(h, &self.qkv)?;
            return Ok((self.by_head.map_or(Ok(qkv), |heads| b.regroup(qkv, heads, 3))?, None));
        }
        let [queries, keys, values] = &self.qkv[..] else { unreachable!("each has a projection") };
        let (mut parts, mut gate) = (Vec::new(), None);
        for (i, map) in [queries, keys].into_iter().enumerate() {
            let mut part = b.linear(h, map)?;
            if self.gated && i == 0 {
                let [queries, gates] = b.split_rows(part, [heads.head_dim; 2])?;
                (part, gate) = (queries, Some(gates));
            }
            if let Some(norms) = norms {
                part = b.rms_norm_heads(part, &norms[i])?;
            }
            if let Some(rotating) = self.neighbors {
                part = b.part_neighbors(part, heads.head_dim, rotating)?;
            }
            parts.push(part);
        }
        parts.push(b.linear(h, values)?);
        Ok((b.concat(&parts), gate))
    }

    /// Computes the norms of rotated queries and keys, if there are any.
    fn normed_after(&self, b: &mut Builder<'_>, qkv: Tensor, heads: &Attention) -> Result<Tensor, Error> {
        let Some(norms) = self.qk_norms.as_ref().filter(|_| self.norms_follow_rotation) else {
            return Ok(qkv);
        };
        let widths = [heads.heads, heads.kv_heads, heads.kv_heads].map(|heads_of| heads_of * heads.head_dim);
        let [queries, keys, values] = b.split(qkv, widths)?;
        let [queries, keys] = [b.rms_norm_heads(queries, &norms[0])?, b.rms_norm_heads(keys, &norms[1])?];
        Ok(b.concat(&[queries, keys, values]))
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
            let width = if scope == QkNorm::Rows { row } else { config.head_dim };
            describe_rms_norm(config, name, width, d)
        };
        [norm(config.names.qk_norms[0], rows[0]), norm(config.names.qk_norms[1], rows[1])]
    })
}
