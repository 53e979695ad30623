//! GLM 4.5 and 4.6: mixtures as in DeepSeek V3, and attention with projections to heads.

use std::sync::Arc;

use super::Family;
use super::decoder::{self, Defaults, ROTARY_TABLES};
use super::latent::{self, MixtureDefaults};
use super::rope::Rotary;
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Names, QkNorm};
use crate::op::Groups;

pub(super) const FAMILY: Family = Family {
    model_type: "glm4_moe",
    class: "Glm4MoeForCausalLM",
    base_class: "Glm4MoeModel",
    about: "Mixtures as in `deepseek_v3`; a part of each head rotates (`partial_rotary_factor`, 0.5 if absent); norms of queries \
            and keys per head if `use_qk_norm`.",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const NAMES: Names = Names { class: "Glm4Moe", ..Names::LLAMA };
const DEFAULTS: Defaults = Defaults {
    kv_heads: Some(8),
    eps: (decoder::RMS_EPS, 1e-5),
    positions: 131_072,
    rotary: Rotary { partial: Some(("partial_rotary_factor", 0.5)), ..Defaults::LLAMA.rotary },
    ..Defaults::LLAMA
};
const MIXTURE: MixtureDefaults =
    MixtureDefaults { experts: [128, 8], inner: 1408, scale: 1.0, groups: Groups::ONE };

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    let mut config = DecoderConfig {
        qkv_bias: keys.flag("attention_bias", false)?,
        qk_norm: keys.flag("use_qk_norm", false)?.then_some(QkNorm::Heads),
        keep_f32: decoder::ROUTERS,
        ..decoder::parse(keys, NAMES, &DEFAULTS)?
    };
    let mixture = latent::mixture(keys, &MIXTURE)?;
    latent::set_mixtures(keys, &mut config, mixture, 1)?;
    Ok(config)
}
