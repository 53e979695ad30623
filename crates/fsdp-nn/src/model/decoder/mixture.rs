//! A mixture of experts that replaces an MLP.

use fsdp_core::Error;
use fsdp_core::model::ParamId;

use super::config::{DecoderConfig, Mixture, SharedExpert};
use super::mlp::Mlp;
use crate::graph::{Builder, Tensor};
use crate::layer::{Describe, ExpertMaps, Layer, Linear};
use crate::op::Function;

/// The modules of a mixture.
#[derive(Clone, Debug)]
pub(super) struct Experts {
    router: Router,
    mixture: Mixture,
    activation: Function,
    gate: ExpertMaps,
    up: ExpertMaps,
    down: ExpertMaps,
    shared: Option<Shared>,
}

/// The map from hidden states to logits of experts, and the correction of their scores.
#[derive(Clone, Debug)]
struct Router {
    map: Linear,
    score_bias: Option<ParamId>,
}

impl Layer for Router {
    fn params(&self) -> Vec<ParamId> {
        self.map.params().into_iter().chain(self.score_bias).collect()
    }
}

/// The MLP that all tokens go through, and the map to its weight.
#[derive(Clone, Debug)]
struct Shared {
    mlp: Mlp,
    weight: Option<Linear>,
}

impl Experts {
    /// Describes the router and the experts, in the open module.
    pub(super) fn describe(config: &DecoderConfig, mixture: &Mixture, d: &mut Describe) -> Self {
        let &Mixture { experts, top, inner, gating, shared, .. } = mixture;
        let (names, hidden, share) = (&config.names, config.hidden_size, top as f64 / experts as f64);
        let [gate, up] = *names.gate_up else { unreachable!("experts have a gate") };
        let maps = |inputs, outputs| ExpertMaps { weights: Vec::new(), inputs, outputs };
        let map = d.router("gate", hidden, experts);
        let score_bias = gating.biased.then(|| d.constant(names.score_bias, &[experts]));
        let mut described = Self {
            router: Router { map, score_bias },
            mixture: *mixture,
            activation: config.activation,
            gate: maps(hidden, inner),
            up: maps(hidden, inner),
            down: maps(inner, hidden),
            shared: None,
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
        described.shared = shared.map(|shared| Shared::describe(config, shared, d));
        described
    }

    /// Returns the layers that read parameters.
    pub(super) fn layers(&self) -> Vec<&dyn Layer> {
        let shared = self.shared.iter().flat_map(Shared::layers);
        [&self.router as &dyn Layer, &self.gate, &self.up, &self.down].into_iter().chain(shared).collect()
    }

    /// Returns, per row, the weighted sum of its experts' outputs, and what the shared one adds.
    pub(super) fn transform(&self, b: &mut Builder<'_>, h: Tensor) -> Result<Tensor, Error> {
        let Mixture { top, gating, scale, .. } = self.mixture;
        let logits = b.linear(h, &self.router.map)?;
        let (routes, weights) = b.route(logits, top, gating, self.router.score_bias)?;
        let weights = b.scale(weights, scale);
        let (x, routes, weights) = b.to_experts(h, &routes, weights)?;
        let x = b.dispatch(x, &routes);
        let pair = b.expert_products(x, &routes, &[&self.gate, &self.up])?;
        let inner = b.gated(self.activation, pair[0], pair[1])?;
        let y = b.expert_products(inner, &routes, &[&self.down])?;
        let y = b.combine(y[0], weights, &routes);
        match &self.shared {
            None => Ok(y),
            Some(shared) => {
                let other = shared.transform(b, h)?;
                b.add(y, other)
            }
        }
    }
}

impl Shared {
    fn describe(config: &DecoderConfig, shared: SharedExpert, d: &mut Describe) -> Self {
        let names = &config.names;
        let mlp =
            d.module(names.shared_expert, &names.class("MLP"), |d| Mlp::describe(config, shared.inner, d));
        let gate = format!("{}_gate", names.shared_expert);
        let weight = shared.is_weighed.then(|| d.linear(&gate, config.hidden_size, 1, false));
        Self { mlp, weight }
    }

    fn layers(&self) -> Vec<&dyn Layer> {
        let weight = self.weight.iter().map(|map| map as &dyn Layer);
        self.mlp.layers().into_iter().chain(weight).collect()
    }

    fn transform(&self, b: &mut Builder<'_>, h: Tensor) -> Result<Tensor, Error> {
        let y = self.mlp.transform(b, h)?;
        let Some(map) = &self.weight else { return Ok(y) };
        let logits = b.linear(h, map)?;
        b.weigh_rows(y, logits)
    }
}
