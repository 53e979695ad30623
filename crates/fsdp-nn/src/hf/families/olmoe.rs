//! OLMoE: mixtures of experts in all layers, and norms of queries and keys over all heads.

use std::sync::Arc;

use super::Family;
use super::decoder::{self, Defaults, ROTARY_TABLES};
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Mixture, Names, QkNorm};

pub(super) const FAMILY: Family = Family {
    model_type: "olmoe",
    class: "OlmoeForCausalLM",
    base_class: "OlmoeModel",
    about: "Mixtures of experts in all layers; queries and keys have norms over all heads.",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const NAMES: Names = Names { class: "Olmoe", ..Names::LLAMA };
const DEFAULTS: Defaults = Defaults {
    eps: (decoder::RMS_EPS, 1e-5),
    positions: 4096,
    padding: Some((decoder::PAD_TOKEN, Some(1))),
    ..Defaults::LLAMA
};

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    keys.only_null("clip_qkv")?;
    // Its norms have the sizes of such heads.
    keys.only_null("head_dim")?;
    keys.only_null("sliding_window")?;
    let bias = keys.flag("attention_bias", false)?;
    let mut config = DecoderConfig {
        qk_norm: Some(QkNorm::Rows),
        qkv_bias: bias,
        output_bias: bias,
        router_loss: decoder::router_loss(keys, 0.01)?,
        ..decoder::parse(keys, NAMES, &DEFAULTS)?
    };
    let normalized = keys.flag("norm_topk_prob", false)?;
    let mixture = Mixture::softmax(decoder::experts(keys, [64, 8])?, config.intermediate_size, normalized);
    config.layers.iter_mut().for_each(|layer| layer.mixture = Some(mixture));
    Ok(config)
}
