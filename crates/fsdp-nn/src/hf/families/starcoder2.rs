//! StarCoder 2: layer norms, biases, an MLP without a gate, and a window.

use std::sync::Arc;

use super::Family;
use super::decoder::{self, Defaults, ROTARY_TABLES};
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Names, NormKind};
use crate::op::Function;

pub(super) const FAMILY: Family = Family {
    model_type: "starcoder2",
    class: "Starcoder2ForCausalLM",
    base_class: "Starcoder2Model",
    about: "Layer norms, biases, an MLP without a gate; all layers may have a window.",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const NAMES: Names = Names { class: "Starcoder2", gate_up: &["c_fc"], down: "c_proj", ..Names::LLAMA };
const DEFAULTS: Defaults = Defaults {
    kv_heads: Some(2),
    activation: ("hidden_act", Function::GeluTanh),
    eps: ("norm_epsilon", 1e-5),
    positions: 4096,
    tied: true,
    ..Defaults::LLAMA
};

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    decoder::only_full_attention(keys)?;
    let bias = keys.flag("use_bias", true)?;
    let mut config = DecoderConfig {
        norm: NormKind::Layer,
        is_gated: false,
        qkv_bias: bias,
        output_bias: bias,
        mlp_bias: bias,
        initializer_range: keys.initializer_range(0.018_042)?,
        residual_dropout: keys.probability("residual_dropout", 0.0)?,
        embedding_dropout: keys.probability("embedding_dropout", 0.0)?,
        ..decoder::parse(keys, NAMES, &DEFAULTS)?
    };
    let window = decoder::window(keys, None)?;
    config.layers.iter_mut().for_each(|layer| layer.window = window);
    Ok(config)
}
