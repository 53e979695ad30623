//! DeepSeek V3, and models published with its code (Kimi K2): latent attention, and mixtures with corrected logistic
//! scores and shared experts after the first layers.

use std::sync::Arc;

use super::Family;
use super::decoder::{self, Defaults, ROTARY_TABLES};
use super::latent::{self, MixtureDefaults};
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Names};
use crate::op::Groups;

pub(super) const FAMILY: Family = Family {
    model_type: "deepseek_v3",
    class: "DeepseekV3ForCausalLM",
    base_class: "DeepseekV3Model",
    about: "Latent attention; mixtures of experts in all layers but the first `first_k_dense_replace`, with logistic scores that \
            `e_score_correction_bias` corrects for the choice, groups of experts, and shared experts. Kimi K2 (`kimi_k2`) \
            is published with this class, too. The correction is a constant of the model, as in transformers.",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const NAMES: Names = Names { class: "DeepseekV3", ..Names::LLAMA };
pub(super) const DEFAULTS: Defaults = Defaults { is_latent: true, positions: 4096, ..Defaults::LLAMA };
const MIXTURE: MixtureDefaults =
    MixtureDefaults { experts: [256, 8], inner: 2048, scale: 2.5, groups: Groups { count: 8, top: 4 } };

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    let bias = keys.flag("attention_bias", false)?;
    let mut config = DecoderConfig {
        qkv_bias: bias,
        output_bias: bias,
        keep_f32: decoder::ROUTERS,
        ..decoder::parse(keys, NAMES, &DEFAULTS)?
    };
    let mixture = latent::mixture(keys, &MIXTURE)?;
    latent::set_mixtures(keys, &mut config, mixture, 3)?;
    Ok(config)
}
