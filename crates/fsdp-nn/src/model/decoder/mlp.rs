//! The MLP of a layer.

use fsdp_core::Error;

use super::config::DecoderConfig;
use crate::graph::{Builder, Tensor};
use crate::layer::{Describe, Layer, Linear};
use crate::op::Function;

/// The modules of an MLP.
#[derive(Clone, Debug)]
pub(super) struct Mlp {
    /// Projections to gate and up; or one to both; or the only one.
    gate_up: Vec<Linear>,
    is_gated: bool,
    activation: Function,
    down: Linear,
}

impl Mlp {
    /// Describes an MLP of this inner width, in the open module.
    pub(super) fn describe(config: &DecoderConfig, inner: usize, d: &mut Describe) -> Self {
        let (hidden, bias) = (config.hidden_size, config.mlp_bias);
        let names = &config.names;
        let width = (1 + usize::from(config.is_gated)) * inner / names.gate_up.len();
        Self {
            gate_up: names.gate_up.iter().map(|name| d.linear(name, hidden, width, bias)).collect(),
            is_gated: config.is_gated,
            activation: config.activation,
            down: d.linear(names.down, inner, hidden, bias),
        }
    }

    /// Returns the layers that read parameters.
    pub(super) fn layers(&self) -> Vec<&dyn Layer> {
        self.gate_up.iter().chain([&self.down]).map(|map| map as &dyn Layer).collect()
    }

    /// Returns its output.
    pub(super) fn transform(&self, b: &mut Builder<'_>, h: Tensor) -> Result<Tensor, Error> {
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
