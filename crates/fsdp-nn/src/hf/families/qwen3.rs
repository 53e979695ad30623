//! Qwen 3: norms of queries and keys, separately for each head.

use std::sync::Arc;

use super::Family;
use super::decoder::{self, Defaults, ROTARY_TABLES};
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Names, QkNorm};

pub(super) const FAMILY: Family = Family {
    model_type: "qwen3",
    class: "Qwen3ForCausalLM",
    base_class: "Qwen3Model",
    about: "Queries and keys have norms per head; later layers may have a window.",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const NAMES: Names = Names { class: "Qwen3", ..Names::LLAMA };
const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(32), head_dim: Some(128), positions: 32768, ..Defaults::LLAMA };

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    let bias = keys.flag("attention_bias", false)?;
    let mut config = DecoderConfig {
        qk_norm: Some(QkNorm::Heads),
        qkv_bias: bias,
        output_bias: bias,
        ..decoder::parse(keys, NAMES, &DEFAULTS)?
    };
    super::qwen2::windows_of_later_layers(keys, &mut config)?;
    Ok(config)
}
