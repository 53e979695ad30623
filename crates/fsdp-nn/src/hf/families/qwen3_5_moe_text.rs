//! Qwen 3.5 with mixtures of experts, text: as without, with a mixture in every layer.

use std::sync::Arc;

use super::Family;
use super::decoder::{self, Defaults, ROTARY_TABLES};
use super::{delta, qwen3_5_text};
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Names};

pub(super) const FAMILY: Family = Family {
    model_type: "qwen3_5_moe_text",
    class: "Qwen3_5MoeForCausalLM",
    base_class: "Qwen3_5MoeTextModel",
    about: "As `qwen3_5_text`, with mixtures of experts in all layers, beside a shared expert with a weight.",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const NAMES: Names = Names { class: "Qwen3_5Moe", shared_expert: "shared_expert", ..Names::LLAMA };
const DEFAULTS: Defaults = Defaults { inner: "moe_intermediate_size", ..qwen3_5_text::DEFAULTS };

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    // Transformers ignores these keys of earlier families, and has no other values.
    keys.only("norm_topk_prob", "true", |flag| flag == true)?;
    keys.only("decoder_sparse_step", "1", |step| step.as_u64() == Some(1))?;
    keys.only("mlp_only_layers", "an empty list", |layers| layers.as_array().is_some_and(Vec::is_empty))?;
    let mut config = delta::parse(keys, NAMES, &DEFAULTS, false)?;
    config.router_loss = decoder::router_loss(keys, 0.001)?;
    let mixture = delta::mixture(keys, [256, 8], true)?;
    config.layers.iter_mut().for_each(|layer| layer.mixture = Some(mixture));
    Ok(config)
}
