//! OLMo 2: norms after attention and MLP instead of before them, and norms of queries and keys over all heads.

use std::sync::Arc;

use super::Family;
use super::decoder::{self, Defaults, ROTARY_TABLES};
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Names, QkNorm};

pub(super) const FAMILY: Family = Family {
    model_type: "olmo2",
    class: "Olmo2ForCausalLM",
    base_class: "Olmo2Model",
    about: "Norms come after attention and MLP instead of before them; queries and keys have norms over all heads.",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

pub(super) const NAMES: Names = Names {
    class: "Olmo2",
    before_attention: None,
    after_attention: Some("post_attention_layernorm"),
    before_mlp: None,
    after_mlp: Some("post_feedforward_layernorm"),
    ..Names::LLAMA
};
pub(super) const DEFAULTS: Defaults = Defaults {
    eps: (decoder::RMS_EPS, 1e-5),
    padding: Some((decoder::PAD_TOKEN, Some(1))),
    ..Defaults::LLAMA
};

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    decoder::only_full_attention(keys)?;
    keys.only_null("sliding_window")?;
    let bias = keys.flag("attention_bias", false)?;
    Ok(DecoderConfig {
        qk_norm: Some(QkNorm::Rows),
        qkv_bias: bias,
        output_bias: bias,
        ..decoder::parse(keys, NAMES, &DEFAULTS)?
    })
}
