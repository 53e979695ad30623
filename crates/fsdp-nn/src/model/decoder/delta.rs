//! Linear attention in the place of attention: maps to queries, keys, values and gates, a short convolution, the gated delta
//! rule, and a norm with a gate before the output projection.

use fsdp_core::Error;

use super::config::{DecoderConfig, DeltaNet};
use crate::graph::{Builder, Tensor};
use crate::init::Init;
use crate::layer::{Convolution, DeltaGates, Describe, Layer, Linear, RmsNorm};
use crate::op::{DeltaDims, Function};

/// The rate of decay of heads that are not trained yet is uniform between these.
const RATES: [f64; 2] = [0.01, 16.0];

/// The modules of linear attention.
#[derive(Clone, Debug)]
pub(super) struct LinearAttention {
    gates: DeltaGates,
    convolution: Convolution,
    maps: Maps,
    norm: RmsNorm,
    output: Linear,
}

/// The maps of hidden states.
#[derive(Clone, Debug)]
enum Maps {
    /// To queries, keys, values and the gate of the output, and to the gates of the rule, each by key head.
    ByHead([Linear; 2]),
    /// To queries, keys and values, to the gate of the output, and to each of the gates of the rule.
    Separate([Linear; 4]),
}

impl LinearAttention {
    /// Describes the linear attention of a layer, in the open module.
    pub(super) fn describe(config: &DecoderConfig, net: &DeltaNet, d: &mut Describe) -> Self {
        let &DeltaNet { key_heads, value_heads, key_dim, value_dim, kernel, by_head } = net;
        let dims = DeltaDims { batch: 0, seq: 0, key_heads, value_heads, key_dim, value_dim, packed: false };
        let (width, inner) = (dims.width(), value_heads * value_dim);
        d.linear_attention();
        let dt_bias = d.param("dt_bias", &[value_heads], Init::Ones);
        let a_log = d.param("A_log", &[value_heads], Init::LogUniform { low: RATES[0], high: RATES[1] });
        let weight = d.module("conv1d", "Conv1d", |d| d.weight("weight", &[width, 1, kernel]));
        let map = |d: &mut Describe, name: &str, outputs| d.linear(name, config.hidden_size, outputs, false);
        let by_head = by_head.then(|| {
            Maps::ByHead([map(d, "in_proj_qkvz", width + inner), map(d, "in_proj_ba", 2 * value_heads)])
        });
        let norm = d.rms_norm("norm", &config.names.class("RMSNormGated"), value_dim, config.norm_eps);
        let output = d.linear("out_proj", inner, config.hidden_size, false);
        let maps = by_head.unwrap_or_else(|| {
            let [qkv, z] = [("in_proj_qkv", width), ("in_proj_z", inner)];
            let [b, a] = ["in_proj_b", "in_proj_a"].map(|name| (name, value_heads));
            Maps::Separate([qkv, z, b, a].map(|(name, outputs)| map(d, name, outputs)))
        });
        let gates = DeltaGates { a_log, dt_bias, dims };
        Self { gates, convolution: Convolution { weight, width, kernel }, maps, norm, output }
    }

    /// Returns the layers that read parameters.
    pub(super) fn layers(&self) -> Vec<&dyn Layer> {
        let maps = match &self.maps {
            Maps::ByHead(maps) => &maps[..],
            Maps::Separate(maps) => maps,
        };
        let others = [&self.gates as &dyn Layer, &self.convolution, &self.norm, &self.output];
        maps.iter().map(|map| map as &dyn Layer).chain(others).collect()
    }

    /// Returns the output projection of what heads read from their states.
    pub(super) fn attend(&self, b: &mut Builder<'_>, h: Tensor) -> Result<Tensor, Error> {
        let DeltaDims { key_heads, key_dim, value_dim, .. } = self.gates.dims;
        let (qkv, gate, gates) = match &self.maps {
            Maps::ByHead([qkvz, ba]) => {
                let values = self.gates.dims.group() * value_dim;
                let all = b.linear(h, qkvz)?;
                let [q, k, v, gate] = b.split_rows(all, [key_dim, key_dim, values, values])?;
                let gates = b.linear(h, ba)?;
                (b.concat(&[q, k, v]), gate, b.regroup(gates, key_heads, 2)?)
            }
            Maps::Separate([qkv, z, gates @ ..]) => {
                (b.linear(h, qkv)?, b.linear(h, z)?, b.linear_columns(h, gates)?)
            }
        };
        let qkv = b.convolve(qkv, &self.convolution)?;
        let y = b.delta_rule(qkv, gates, &self.gates)?;
        let y = b.rms_norm_heads(y, &self.norm)?;
        let y = b.gated(Function::Silu, gate, y)?;
        b.linear(y, &self.output)
    }
}
