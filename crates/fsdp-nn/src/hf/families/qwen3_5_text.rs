//! Qwen 3.5, text: linear attention in most layers, and attention with gates in the others.

use std::sync::Arc;

use super::Family;
use super::decoder::{Defaults, ROTARY_TABLES};
use super::delta;
use super::rope::Rotary;
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Names};

pub(super) const FAMILY: Family = Family {
    model_type: "qwen3_5_text",
    class: "Qwen3_5ForCausalLM",
    base_class: "Qwen3_5TextModel",
    about: "As `qwen3_next`, with an MLP in all layers and separate projections in linear attention. Positions are those of text: \
            sections (`mrope_section`, `mrope_interleaved`) change nothing.",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const NAMES: Names = Names { class: "Qwen3_5", ..Names::LLAMA };

/// The defaults of the families of Qwen 3.5.
pub(super) const DEFAULTS: Defaults = Defaults {
    rotary: Rotary { more: &["mrope_section", "mrope_interleaved"], ..delta::DEFAULTS.rotary },
    ..delta::DEFAULTS
};

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    delta::parse(keys, NAMES, &Defaults { kv_heads: Some(4), ..DEFAULTS }, false)
}
