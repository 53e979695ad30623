//! HunYuan (dense): a Llama with norms of queries and keys after rotation.

use std::sync::Arc;

use super::Family;
use super::decoder::{self, Defaults, ROTARY_TABLES};
use super::rope::{ALPHA, Rotary};
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::hf::limits::WIDTH_MAX;
use crate::model::{DecoderConfig, Names, QkNorm};

pub(super) const FAMILY: Family = Family {
    model_type: "hunyuan_v1_dense",
    class: "HunYuanDenseV1ForCausalLM",
    base_class: "HunYuanDenseV1Model",
    about: "HunYuan, dense: queries and keys have norms per head after rotation; `head_dim` is required; `dynamic` rotary positions may have \
            `alpha`, which affects sequences of at most `max_position_embeddings`.",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const NAMES: Names =
    Names { class: "HunYuanDenseV1", qk_norms: ["query_layernorm", "key_layernorm"], ..Names::LLAMA };
const DEFAULTS: Defaults = Defaults {
    eps: (decoder::RMS_EPS, 1e-5),
    rotary: Rotary { more: &[ALPHA], ..Defaults::LLAMA.rotary },
    padding: Some((decoder::PAD_TOKEN, Some(0))),
    ..Defaults::LLAMA
};

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    let bias = keys.flag("attention_bias", false)?;
    // Transformers builds no model without.
    keys.required_size(&["head_dim"], WIDTH_MAX)?;
    Ok(DecoderConfig {
        qk_norm: Some(QkNorm::RotatedHeads),
        qkv_bias: bias,
        output_bias: bias,
        ..decoder::parse(keys, NAMES, &DEFAULTS)?
    })
}
