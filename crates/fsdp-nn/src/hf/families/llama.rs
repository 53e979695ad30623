//! Llama (1 to 3.3).

use std::sync::Arc;

use super::Family;
use super::decoder::{self, Defaults, ROTARY_TABLES};
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Names};

pub(super) const FAMILY: Family = Family {
    model_type: "llama",
    class: "LlamaForCausalLM",
    base_class: "LlamaModel",
    about: "Llama 1 to 3.3, and models published as Llama.",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    decoder::only_full_attention(keys)?;
    keys.only_null("sliding_window")?;
    let bias = keys.flag("attention_bias", false)?;
    Ok(DecoderConfig {
        qkv_bias: bias,
        output_bias: bias,
        mlp_bias: keys.flag("mlp_bias", false)?,
        ..decoder::parse(keys, Names::LLAMA, &Defaults::LLAMA)?
    })
}
