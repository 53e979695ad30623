//! GLM 4.7 Flash: DeepSeek V3 with its own list of layers that are mixtures.

use std::sync::Arc;

use super::Family;
use super::decoder::{self, Defaults, ROTARY_TABLES};
use super::deepseek_v3;
use super::latent::{self, MixtureDefaults};
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Names};
use crate::op::Groups;

pub(super) const FAMILY: Family = Family {
    model_type: "glm4_moe_lite",
    class: "Glm4MoeLiteForCausalLM",
    base_class: "Glm4MoeLiteModel",
    about: "As `deepseek_v3`; `mlp_layer_types` lists which layers are mixtures, all but the first if absent.",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const NAMES: Names = Names { class: "Glm4MoeLite", ..Names::LLAMA };
const DEFAULTS: Defaults =
    Defaults { eps: (decoder::RMS_EPS, 1e-5), positions: 202_752, ..deepseek_v3::DEFAULTS };
const MIXTURE: MixtureDefaults =
    MixtureDefaults { experts: [64, 4], inner: 1536, scale: 1.8, groups: Groups::ONE };

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    let bias = keys.flag("attention_bias", false)?;
    let mut config = DecoderConfig {
        qkv_bias: bias,
        output_bias: bias,
        keep_f32: decoder::ROUTERS,
        ..decoder::parse(keys, NAMES, &DEFAULTS)?
    };
    let mixture = latent::mixture(keys, &MIXTURE)?;
    let key = "mlp_layer_types";
    let is_mixture: Vec<bool> = match keys.get(key) {
        None => (0..config.layers.len()).map(|index| index > 0).collect(),
        Some(types) => {
            let kind = |kind: &serde_json::Value| match kind.as_str() {
                Some("dense") => Some(false),
                Some("sparse") => Some(true),
                _ => None,
            };
            let types = types.as_array().filter(|types| types.len() == config.layers.len());
            let kinds = types.and_then(|types| types.iter().map(kind).collect());
            kinds.ok_or_else(|| keys.wrong(key, "a list with \"dense\" or \"sparse\" for each layer"))?
        }
    };
    for (layer, is_mixture) in config.layers.iter_mut().zip(is_mixture) {
        layer.mixture = is_mixture.then_some(mixture);
    }
    Ok(config)
}
