//! Cohere 2 (Command R7B, Command A): attention and MLP in parallel behind one layer norm, windows with rotation.

use std::sync::Arc;

use super::Family;
use super::decoder::{self, Defaults, ROTARY_TABLES};
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Names, NormKind};

pub(super) const FAMILY: Family = Family {
    model_type: "cohere2",
    class: "Cohere2ForCausalLM",
    base_class: "Cohere2Model",
    about: "Command R7B and Command A: attention and MLP in parallel behind one layer norm without a bias; neighboring elements of a head \
            rotate together, only in layers with a window, which are three of four; logits have a factor (`logit_scale`).",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const NAMES: Names = Names { class: "Cohere2", before_mlp: None, ..Names::LLAMA };
const DEFAULTS: Defaults = Defaults {
    eps: ("layer_norm_eps", 1e-5),
    positions: 8192,
    tied: true,
    padding: Some((decoder::PAD_TOKEN, Some(0))),
    ..Defaults::LLAMA
};

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    let bias = keys.flag("attention_bias", false)?;
    let mut config = DecoderConfig {
        is_parallel: true,
        norm: NormKind::LayerWithoutBias,
        rotates_neighbors: true,
        logit_scale: keys.positive("logit_scale", 0.0625)?,
        qkv_bias: bias,
        output_bias: bias,
        ..decoder::parse(keys, NAMES, &DEFAULTS)?
    };
    // Transformers reads it only without `layer_types`.
    let pattern = match keys.get("layer_types") {
        Some(_) => None,
        None => keys.size(&["sliding_window_pattern"], usize::MAX)?,
    };
    decoder::set_required_windows(keys, &mut config, pattern.unwrap_or(4))?;
    for layer in config.layers.iter_mut().filter(|layer| layer.window.is_none()) {
        layer.rope = None;
    }
    Ok(config)
}
