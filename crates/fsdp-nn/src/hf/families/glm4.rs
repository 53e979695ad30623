//! GLM 4 (dense): norms around both halves, a packed gate, rotation of neighbors in a part of each head.

use std::sync::Arc;

use super::Family;
use super::decoder::{self, Defaults, ROTARY_TABLES};
use super::rope::Rotary;
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Names};

pub(super) const FAMILY: Family = Family {
    model_type: "glm4",
    class: "Glm4ForCausalLM",
    base_class: "Glm4Model",
    about: "GLM 4, dense: norms before and after attention and MLP, a packed gate; neighboring elements of a part of each head rotate \
            together (`partial_rotary_factor`; 0.5 if absent).",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const NAMES: Names = Names {
    class: "Glm4",
    gate_up: &["gate_up_proj"],
    inputs_have_norms_first: true,
    after_attention: Some("post_self_attn_layernorm"),
    after_mlp: Some("post_mlp_layernorm"),
    ..Names::LLAMA
};
const DEFAULTS: Defaults = Defaults {
    kv_heads: Some(2),
    head_dim: Some(128),
    eps: (decoder::RMS_EPS, 0.000_000_156_25),
    rotary: Rotary { partial: Some(("partial_rotary_factor", 0.5)), ..Defaults::LLAMA.rotary },
    positions: 131_072,
    padding: Some((decoder::PAD_TOKEN, Some(151_329))),
    ..Defaults::LLAMA
};

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    Ok(DecoderConfig {
        rotates_neighbors: true,
        qkv_bias: keys.flag("attention_bias", true)?,
        ..decoder::parse(keys, NAMES, &DEFAULTS)?
    })
}
