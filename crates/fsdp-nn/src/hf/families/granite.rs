//! Granite 3 (dense): a Llama with factors of embeddings, scores, what layers add, and logits.

use std::sync::Arc;

use super::Family;
use super::decoder::{self, Defaults, ROTARY_TABLES};
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Names};

pub(super) const FAMILY: Family = Family {
    model_type: "granite",
    class: "GraniteForCausalLM",
    base_class: "GraniteModel",
    about: "A Llama with factors of embeddings, scores (`attention_multiplier`; 1 if absent), what layers add, and logits \
            (`logits_scaling` divides them).",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const NAMES: Names = Names { class: "Granite", ..Names::LLAMA };

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    Ok(DecoderConfig { mlp_bias: keys.flag("mlp_bias", false)?, ..parse_with(keys, NAMES)? })
}

/// Parses what models with an MLP and with mixtures share.
pub(super) fn parse_with(keys: Keys<'_>, names: Names) -> Result<DecoderConfig, ConfigError> {
    let bias = keys.flag("attention_bias", false)?;
    Ok(DecoderConfig {
        qkv_bias: bias,
        output_bias: bias,
        embedding_scale: keys.positive("embedding_multiplier", 1.0)?,
        attention_scale: Some(keys.positive("attention_multiplier", 1.0)?),
        residual_scale: keys.positive("residual_multiplier", 1.0)?,
        logit_scale: 1.0 / keys.positive("logits_scaling", 1.0)?,
        ..decoder::parse(keys, names, &Defaults::LLAMA)?
    })
}
