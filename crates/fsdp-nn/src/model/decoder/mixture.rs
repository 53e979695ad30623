//! A mixture of experts that replaces an MLP.

use fsdp_core::Error;
use fsdp_core::model::ParamId;

use super::config::{DecoderConfig, Mixture, PackedExperts, SharedExpert};
use super::mlp::Mlp;
use crate::graph::{Builder, Tensor};
use crate::layer::{Describe, ExpertMaps, Layer, Linear};
use crate::op::{ExpertDims, Function, Orientation};

/// The modules of a mixture.
#[derive(Clone, Debug)]
pub(super) struct Experts {
    router: Router,
    mixture: Mixture,
    activation: Function,
    /// To gate and up, or to both.
    gate_up: Vec<ExpertMaps>,
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
        let &Mixture { experts, gating, shared, .. } = mixture;
        let names = &config.names;
        let is_biased = mixture.packed.is_some_and(|packed| packed.bias);
        let map = d.router(names.router, config.hidden_size, experts, is_biased);
        let score_bias = gating.biased.then(|| {
            let (name, dims) = names.score_bias;
            d.constant(name, &[vec![1; dims - 1], vec![experts]].concat())
        });
        let (gate_up, down) = match mixture.packed {
            None => describe_experts(config, mixture, d),
            Some(packed) => describe_packed_experts(config, mixture, packed, d),
        };
        Self {
            router: Router { map, score_bias },
            mixture: *mixture,
            activation: config.activation,
            gate_up,
            down,
            shared: shared.map(|shared| Shared::describe(config, shared, d)),
        }
    }

    /// The parameter that corrects the scores of experts, if there is one.
    pub(super) fn score_bias(&self) -> Option<ParamId> {
        self.router.score_bias
    }

    /// Returns the layers that read parameters.
    pub(super) fn layers(&self) -> Vec<&dyn Layer> {
        let shared = self.shared.iter().flat_map(Shared::layers);
        let maps = self.gate_up.iter().chain([&self.down]).map(|maps| maps as &dyn Layer);
        [&self.router as &dyn Layer].into_iter().chain(maps).chain(shared).collect()
    }

    /// Returns, per row, the weighted sum of its experts' outputs, and what the shared one adds.
    pub(super) fn transform(&self, b: &mut Builder<'_>, h: Tensor) -> Result<Tensor, Error> {
        let Mixture { top, gating, scale, .. } = self.mixture;
        let (routes, weights) = b.in_kept_dtype(&self.router.params(), h, |b, h| {
            let logits = b.linear(h, &self.router.map)?;
            let (routes, weights) = b.route(logits, top, gating, self.router.score_bias)?;
            Ok((routes, b.scale(weights, scale)))
        })?;
        let (x, routes, weights) = b.to_experts(h, &routes, weights)?;
        let x = b.dispatch(x, &routes);
        let products = b.expert_products(x, &routes, &self.gate_up)?;
        let [gate, up] = match (self.mixture.packed, &products[..]) {
            (None, &[gate, up]) => [gate, up],
            (Some(PackedExperts { interleaved: true, .. }), &[both]) => b.split_rows(both, [1, 1])?,
            (_, &[both]) => b.split_rows(both, [self.mixture.inner; 2])?,
            _ => unreachable!("experts have a gate"),
        };
        let up = self.mixture.up_activation.map_or(up, |function| b.activation(function, up));
        let inner = b.gated(self.activation, gate, up)?;
        let y = b.expert_products(inner, &routes, std::slice::from_ref(&self.down))?;
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

/// Describes a gated MLP for each expert; returns the maps to gate and up, and to the output.
fn describe_experts(
    config: &DecoderConfig,
    &Mixture { experts, top, inner, .. }: &Mixture,
    d: &mut Describe,
) -> (Vec<ExpertMaps>, ExpertMaps) {
    let (names, hidden, share) = (&config.names, config.hidden_size, top as f64 / experts as f64);
    let [gate, up] = *names.gate_up else { unreachable!("experts have a gate") };
    let maps = |inputs, outputs| ExpertMaps::new(inputs, outputs, Orientation::OutIn);
    let mut described = [maps(hidden, inner), maps(hidden, inner), maps(inner, hidden)];
    d.module("experts", "ModuleList", |d| {
        for expert in 0..experts {
            d.module(&expert.to_string(), &names.class("Expert"), |d| {
                for (maps, name) in described.iter_mut().zip([gate, up, names.down]) {
                    let ExpertDims { inputs, outputs, .. } = maps.dims;
                    let weight = |d: &mut Describe| d.expert(expert, "weight", &[outputs, inputs], share);
                    maps.weights.push(d.module(name, "Linear", weight));
                }
            });
        }
    });
    let [gate, up, down] = described.map(|maps| d.experts(maps));
    (vec![gate, up], down)
}

/// As [`describe_experts`], for experts with one weight to gate and up.
fn describe_packed_experts(
    config: &DecoderConfig,
    &Mixture { experts, top, inner, .. }: &Mixture,
    packed: PackedExperts,
    d: &mut Describe,
) -> (Vec<ExpertMaps>, ExpertMaps) {
    let (hidden, share) = (config.hidden_size, top as f64 / experts as f64);
    let maps = |inputs, outputs| ExpertMaps::new(inputs, outputs, Orientation::InOut);
    let mut described = [maps(hidden, 2 * inner), maps(inner, hidden)];
    d.module("experts", "ModuleList", |d| {
        for expert in 0..experts {
            d.module(&expert.to_string(), &config.names.class("Expert"), |d| {
                for (maps, name) in described.iter_mut().zip(["gate_up_proj", "down_proj"]) {
                    let ExpertDims { inputs, outputs, .. } = maps.dims;
                    maps.weights.push(d.expert(expert, name, &[inputs, outputs], share));
                    if packed.bias {
                        maps.biases.push(d.expert(expert, &format!("{name}_bias"), &[outputs], share));
                    }
                }
            });
        }
    });
    let [gate_up, down] = described.map(|maps| d.experts(maps));
    (vec![gate_up], down)
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
