//! Qwen 2 and 2.5: a Llama with biases of queries, keys and values, and optional windows in later layers.

use std::sync::Arc;

use super::Family;
use super::decoder::{self, Defaults, ROTARY_TABLES};
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Names};

pub(super) const FAMILY: Family = Family {
    model_type: "qwen2",
    class: "Qwen2ForCausalLM",
    base_class: "Qwen2Model",
    about: "Qwen 2 and 2.5: queries, keys and values have biases; later layers may have a window.",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const NAMES: Names = Names { class: "Qwen2", ..Names::LLAMA };
const DEFAULTS: Defaults = Defaults { kv_heads: Some(32), positions: 32768, ..Defaults::LLAMA };

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    let mut config = DecoderConfig { qkv_bias: true, ..decoder::parse(keys, NAMES, &DEFAULTS)? };
    windows_of_later_layers(keys, &mut config)?;
    Ok(config)
}

/// Sets windows if `use_sliding_window` is set: in the layers selected by `layer_types`, or from `max_window_layers`
/// on.
pub(super) fn windows_of_later_layers(keys: Keys<'_>, config: &mut DecoderConfig) -> Result<(), ConfigError> {
    let is_used = keys.flag("use_sliding_window", false)?;
    let window = decoder::window(keys, Some(4096))?.filter(|_| is_used);
    // Unlike other sizes, it may be 0.
    let first =
        keys.number("max_window_layers", 28.0, "a number of layers", |layers| layers >= 0.0)? as usize;
    decoder::set_windows(keys, config, window, |index, _| index >= first)
}
