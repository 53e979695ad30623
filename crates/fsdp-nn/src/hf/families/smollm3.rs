//! SmolLM 3: a Llama in which some layers have no rotary positions, and possibly a window instead.

use std::sync::Arc;

use super::Family;
use super::decoder::{self, Defaults, ROTARY_TABLES};
use super::rope::Rotary;
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Names};

pub(super) const FAMILY: Family = Family {
    model_type: "smollm3",
    class: "SmolLM3ForCausalLM",
    base_class: "SmolLM3Model",
    about: "Some layers have no rotary positions, and may have a window.",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const NAMES: Names = Names { class: "SmolLM3", ..Names::LLAMA };
const DEFAULTS: Defaults = Defaults {
    kv_heads: Some(4),
    positions: 32768,
    tied: true,
    padding: Some((decoder::PAD_TOKEN, Some(128_004))),
    rotary: Rotary { theta: ("rope_theta", 2_000_000.0), ..Defaults::LLAMA.rotary },
    ..Defaults::LLAMA
};

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    let bias = keys.flag("attention_bias", false)?;
    let mut config = DecoderConfig {
        qkv_bias: bias,
        output_bias: bias,
        mlp_bias: keys.flag("mlp_bias", false)?,
        ..decoder::parse(keys, NAMES, &DEFAULTS)?
    };
    let rotates = rotating_layers(keys, config.layers.len())?;
    for (layer, rotates) in config.layers.iter_mut().zip(rotates) {
        layer.rope = layer.rope.take().filter(|_| rotates);
    }
    let is_used = keys.flag("use_sliding_window", false)?;
    let window = decoder::window(keys, None)?.filter(|_| is_used);
    decoder::set_windows(keys, &mut config, window, |_, layer| layer.rope.is_none())?;
    Ok(config)
}

/// Returns which layers have rotary positions: those set in `no_rope_layers` (despite its name), or all but every
/// fourth.
fn rotating_layers(keys: Keys<'_>, layers: usize) -> Result<Vec<bool>, ConfigError> {
    let key = "no_rope_layers";
    let interval = keys.size(&["no_rope_layer_interval"], usize::MAX)?.unwrap_or(4);
    let Some(list) = keys.get(key) else {
        return Ok((1..=layers).map(|number| !number.is_multiple_of(interval)).collect());
    };
    let flags = list.as_array().filter(|list| list.len() >= layers);
    let flags = flags.and_then(|list| list.iter().map(|flag| Some(flag.as_u64()? != 0)).collect());
    flags.ok_or_else(|| {
        keys.wrong(key, "a list with 1 for each layer that has rotary positions, and 0 for others")
    })
}
