//! Mistral: a Llama with a window in every layer.

use std::sync::Arc;

use super::Family;
use super::decoder::{self, Defaults, ROTARY_TABLES};
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Names};

pub(super) const FAMILY: Family = Family {
    model_type: "mistral",
    class: "MistralForCausalLM",
    base_class: "MistralModel",
    about: "A Llama whose layers all have a window (`sliding_window`; 4096 if absent).",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const NAMES: Names = Names { class: "Mistral", ..Names::LLAMA };
const DEFAULTS: Defaults = Defaults { kv_heads: Some(8), positions: 4096 * 32, ..Defaults::LLAMA };

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    decoder::only_full_attention(keys)?;
    let mut config = decoder::parse(keys, NAMES, &DEFAULTS)?;
    let window = decoder::window(keys, Some(4096))?;
    config.layers.iter_mut().for_each(|layer| layer.window = window);
    Ok(config)
}
