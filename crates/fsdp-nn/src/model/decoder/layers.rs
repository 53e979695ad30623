//! A layer of a decoder: its modules, and the computation of its two halves.

use fsdp_core::Error;
use fsdp_core::model::ParamId;

use super::attention::SelfAttention;
use super::config::{DecoderConfig, LayerConfig, NormKind};
use super::delta::LinearAttention;
use super::mixture::Experts;
use super::mlp::Mlp;
use super::names::NormsPlace;
use crate::graph::{Builder, Tensor};
use crate::layer::{Describe, Layer, Norm, RmsNorm};

/// The modules of a layer.
#[derive(Clone, Debug)]
pub(super) struct DecoderLayer {
    norms: Norms,
    attention: Attention,
    transform: Transform,
}

/// The first half of a layer.
#[derive(Clone, Debug)]
enum Attention {
    Softmax(Box<SelfAttention>),
    Linear(Box<LinearAttention>),
}

/// The second half of a layer.
#[derive(Clone, Debug)]
enum Transform {
    Mlp(Mlp),
    Experts(Box<Experts>),
}

/// The norms before and after the two halves.
#[derive(Clone, Debug)]
struct Norms {
    before_attention: Option<Norm>,
    after_attention: Option<Norm>,
    before_mlp: Option<Norm>,
    after_mlp: Option<Norm>,
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
        d.module(&index.to_string(), &names.class(names.layer_class), |d| {
            let norms_at =
                |place, d: &mut Describe| (names.norms == place).then(|| Norms::describe(config, d));
            let first = norms_at(NormsPlace::BeforeAttention, d);
            let attention = match &layer.delta {
                None => d.module(names.attention, &names.class("Attention"), |d| {
                    Attention::Softmax(Box::new(SelfAttention::describe(config, layer, d)))
                }),
                Some(net) => d.module("linear_attn", &names.class("GatedDeltaNet"), |d| {
                    Attention::Linear(Box::new(LinearAttention::describe(config, net, d)))
                }),
            };
            let second = norms_at(NormsPlace::BeforeMlp, d);
            let transform = d.module(names.mlp, &names.class("MLP"), |d| match &layer.mixture {
                None => Transform::Mlp(Mlp::describe(config, config.intermediate_size, d)),
                Some(mixture) => Transform::Experts(Box::new(Experts::describe(config, mixture, d))),
            });
            let norms = first.or(second).unwrap_or_else(|| Norms::describe(config, d));
            Self { norms, attention, transform }
        })
    }

    /// Returns the layers that read parameters in the attention half.
    pub(super) fn attention_layers(&self) -> Vec<&dyn Layer> {
        let norms = self.norms.before_attention.iter().chain(&self.norms.after_attention);
        let norms = norms.map(|norm| norm as &dyn Layer);
        let maps = match &self.attention {
            Attention::Softmax(attention) => attention.layers(),
            Attention::Linear(attention) => attention.layers(),
        };
        norms.chain(maps).collect()
    }

    /// The parameter that corrects the scores of experts, if the layer is a mixture that has one.
    pub(super) fn score_bias(&self) -> Option<ParamId> {
        match &self.transform {
            Transform::Mlp(_) => None,
            Transform::Experts(experts) => experts.score_bias(),
        }
    }

    /// Returns the layers that read parameters in the MLP half.
    pub(super) fn mlp_layers(&self) -> Vec<&dyn Layer> {
        let norms = self.norms.before_mlp.iter().chain(&self.norms.after_mlp);
        let maps = match &self.transform {
            Transform::Mlp(mlp) => mlp.layers(),
            Transform::Experts(experts) => experts.layers(),
        };
        norms.map(|norm| norm as &dyn Layer).chain(maps).collect()
    }

    /// Computes what both halves add if they read the same input.
    pub(super) fn in_parallel(&self, b: &mut Builder<'_>, x: Tensor) -> Result<[Tensor; 2], Error> {
        let h = normed(b, x, self.norms.before_attention.as_ref())?;
        let attended = self.attend_normed(b, h)?;
        let h = match &self.norms.before_mlp {
            Some(norm) => b.norm(x, norm)?,
            None => h,
        };
        Ok([attended, self.transform_normed(b, h)?])
    }

    /// Computes what the attention half adds.
    pub(super) fn attend(&self, b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, Error> {
        let h = normed(b, x, self.norms.before_attention.as_ref())?;
        self.attend_normed(b, h)
    }

    fn attend_normed(&self, b: &mut Builder<'_>, h: Tensor) -> Result<Tensor, Error> {
        let y = match &self.attention {
            Attention::Softmax(attention) => attention.attend(b, h)?,
            Attention::Linear(attention) => attention.attend(b, h)?,
        };
        normed(b, y, self.norms.after_attention.as_ref())
    }

    /// Computes what the MLP half adds.
    pub(super) fn transform(&self, b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, Error> {
        let h = normed(b, x, self.norms.before_mlp.as_ref())?;
        self.transform_normed(b, h)
    }

    fn transform_normed(&self, b: &mut Builder<'_>, h: Tensor) -> Result<Tensor, Error> {
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
        let before_attention = norm(names.before_attention);
        let early = if names.inputs_have_norms_first { norm(names.before_mlp) } else { None };
        Self {
            before_attention,
            after_attention: norm(names.after_attention),
            before_mlp: early.or_else(|| norm(names.before_mlp)),
            after_mlp: norm(names.after_mlp),
        }
    }
}

/// Describes a norm of hidden states.
pub(super) fn describe_norm(config: &DecoderConfig, name: &str, d: &mut Describe) -> Norm {
    match config.norm {
        NormKind::Layer => Norm::Layer(d.layer_norm(name, config.hidden_size, config.norm_eps)),
        NormKind::LayerWithoutBias => {
            let class = config.names.class("LayerNorm");
            Norm::Layer(d.layer_norm_without_bias(name, &class, config.hidden_size, config.norm_eps))
        }
        NormKind::Rms | NormKind::CentredRms => {
            Norm::Rms(describe_rms_norm(config, name, config.hidden_size, d))
        }
    }
}

pub(super) fn describe_rms_norm(
    config: &DecoderConfig,
    name: &str,
    width: usize,
    d: &mut Describe,
) -> RmsNorm {
    let (class, eps) = (config.names.class("RMSNorm"), config.norm_eps);
    match config.norm {
        NormKind::CentredRms => d.centred_rms_norm(name, &class, width, eps),
        _ => d.rms_norm(name, &class, width, eps),
    }
}

fn normed(b: &mut Builder<'_>, x: Tensor, norm: Option<&Norm>) -> Result<Tensor, Error> {
    norm.map_or(Ok(x), |norm| b.norm(x, norm))
}
