//! Seed-OSS: a Llama with wider heads, biases and dropouts.

use std::sync::Arc;

use super::Family;
use super::decoder::{self, Defaults, ROTARY_TABLES};
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Names};

pub(super) const FAMILY: Family = Family {
    model_type: "seed_oss",
    class: "SeedOssForCausalLM",
    base_class: "SeedOssModel",
    about: "Queries, keys and values have biases; dropouts of 0.1 unless the keys say otherwise.",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const NAMES: Names = Names { class: "SeedOss", ..Names::LLAMA };
const DEFAULTS: Defaults = Defaults {
    kv_heads: Some(8),
    head_dim: Some(128),
    positions: 524_288,
    padding: Some((decoder::PAD_TOKEN, Some(1))),
    ..Defaults::LLAMA
};

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    Ok(DecoderConfig {
        qkv_bias: keys.flag("attention_bias", true)?,
        output_bias: keys.flag("attention_out_bias", false)?,
        mlp_bias: keys.flag("mlp_bias", false)?,
        attention_dropout: keys.probability("attention_dropout", 0.1)?,
        residual_dropout: keys.probability("residual_dropout", 0.1)?,
        ..decoder::parse(keys, NAMES, &DEFAULTS)?
    })
}
