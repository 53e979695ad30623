//! A mixture of experts that replaces an MLP.

use fsdp_core::Error;

use super::config::{DecoderConfig, Mixture};
use crate::graph::{Builder, Tensor};
use crate::layer::{Describe, ExpertMaps, Layer, Linear};
use crate::op::Function;

/// The modules of a mixture.
#[derive(Clone, Debug)]
pub(super) struct Experts {
    router: Linear,
    top: usize,
    is_normalized: bool,
    activation: Function,
    gate: ExpertMaps,
    up: ExpertMaps,
    down: ExpertMaps,
}

impl Experts {
    /// Describes the router and the experts, in the open module.
    pub(super) fn describe(config: &DecoderConfig, mixture: &Mixture, d: &mut Describe) -> Self {
        let &Mixture { experts, top, inner, is_normalized } = mixture;
        let (names, hidden, share) = (&config.names, config.hidden_size, top as f64 / experts as f64);
        let [gate, up] = *names.gate_up else { unreachable!("experts have a gate") };
        let maps = |inputs, outputs| ExpertMaps { weights: Vec::new(), inputs, outputs };
        let mut described = Self {
            router: d.router("gate", hidden, experts),
            top,
            is_normalized,
            activation: config.activation,
            gate: maps(hidden, inner),
            up: maps(hidden, inner),
            down: maps(inner, hidden),
        };
        d.module("experts", "ModuleList", |d| {
            for expert in 0..experts {
                d.module(&expert.to_string(), &names.class("Expert"), |d| {
                    described.gate.weights.push(d.expert((expert, gate), hidden, inner, share));
                    described.up.weights.push(d.expert((expert, up), hidden, inner, share));
                    described.down.weights.push(d.expert((expert, names.down), inner, hidden, share));
                });
            }
        });
        described
    }

    /// Returns the layers that read parameters.
    pub(super) fn layers(&self) -> [&dyn Layer; 4] {
        [&self.router, &self.gate, &self.up, &self.down]
    }

    /// Returns, per row, the weighted sum of its experts' outputs.
    pub(super) fn transform(&self, b: &mut Builder<'_>, h: Tensor) -> Result<Tensor, Error> {
        let logits = b.linear(h, &self.router)?;
        let (routes, weights) = b.route(logits, self.top, self.is_normalized);
        let (x, routes, weights) = b.to_experts(h, &routes, weights)?;
        let x = b.dispatch(x, &routes);
        let pair = b.expert_products(x, &routes, &[&self.gate, &self.up])?;
        let inner = b.gated(self.activation, pair[0], pair[1])?;
        let y = b.expert_products(inner, &routes, &[&self.down])?;
        Ok(b.combine(y[0], weights, &routes))
    }
}
