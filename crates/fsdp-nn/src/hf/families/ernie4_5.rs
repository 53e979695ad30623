//! ERNIE 4.5 (dense): a Llama in which neighboring elements of a head rotate together.

use std::sync::Arc;

use super::Family;
use super::decoder::{self, Defaults, ROTARY_TABLES};
use super::rope::Rotary;
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Names};

pub(super) const FAMILY: Family = Family {
    model_type: "ernie4_5",
    class: "Ernie4_5ForCausalLM",
    base_class: "Ernie4_5Model",
    about: "ERNIE 4.5, dense: neighboring elements of a head rotate together; all projections may have biases (`use_bias`).",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const NAMES: Names = Names { class: "Ernie4_5", ..Names::LLAMA };
pub(super) const DEFAULTS: Defaults = Defaults {
    kv_heads: Some(2),
    head_dim: Some(128),
    eps: (decoder::RMS_EPS, 1e-5),
    rotary: Rotary { theta: ("rope_theta", 500_000.0), ..Defaults::LLAMA.rotary },
    positions: 131_072,
    tied: true,
    padding: Some((decoder::PAD_TOKEN, Some(0))),
    ..Defaults::LLAMA
};

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    parse_with(keys, NAMES, &DEFAULTS)
}

/// Parses the keys that it shares with its mixture.
pub(super) fn parse_with(
    keys: Keys<'_>,
    names: Names,
    defaults: &Defaults,
) -> Result<DecoderConfig, ConfigError> {
    let bias = keys.flag("use_bias", false)?;
    Ok(DecoderConfig {
        rotates_neighbors: true,
        qkv_bias: bias,
        output_bias: bias,
        mlp_bias: bias,
        // Transformers ignores the key.
        attention_dropout: 0.0,
        ..decoder::parse(keys, names, defaults)?
    })
}
