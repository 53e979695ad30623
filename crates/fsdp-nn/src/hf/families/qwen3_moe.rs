//! Qwen 3 with mixtures of experts in some or all layers.

use std::sync::Arc;

use serde_json::Value;

use super::Family;
use super::decoder::{self, Defaults, ROTARY_TABLES};
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::hf::limits::INNER_MAX;
use crate::model::{DecoderConfig, Mixture, Names, QkNorm};

pub(super) const FAMILY: Family = Family {
    model_type: "qwen3_moe",
    class: "Qwen3MoeForCausalLM",
    base_class: "Qwen3MoeModel",
    about: "Queries and keys have norms per head; mixtures of experts in every `decoder_sparse_step`-th layer, but \
            not in `mlp_only_layers`; all layers may have a window (`use_sliding_window`).",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const NAMES: Names = Names { class: "Qwen3Moe", ..Names::LLAMA };
const DEFAULTS: Defaults = Defaults { kv_heads: Some(4), positions: 32768, ..Defaults::LLAMA };

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    let bias = keys.flag("attention_bias", false)?;
    let mut config = DecoderConfig {
        qk_norm: Some(QkNorm::Heads),
        qkv_bias: bias,
        output_bias: bias,
        ..decoder::parse(keys, NAMES, &DEFAULTS)?
    };
    config.router_loss = decoder::router_loss(keys, 0.001)?;
    let inner = keys.size(&["moe_intermediate_size"], INNER_MAX)?.unwrap_or(768);
    let is_normalized = keys.flag("norm_topk_prob", false)?;
    let mixture = Mixture::softmax(decoder::experts(keys, [128, 8])?, inner, is_normalized);
    let is_used = keys.flag("use_sliding_window", false)?;
    let window = decoder::window(keys, Some(4096))?.filter(|_| is_used);
    for (layer, is_mixture) in config.layers.iter_mut().zip(sparse_layers(keys)?) {
        (layer.window, layer.mixture) = (window, is_mixture.then_some(mixture));
    }
    Ok(config)
}

/// Returns, for each layer, whether it is a mixture: every `decoder_sparse_step`-th that is not in `mlp_only_layers`.
pub(super) fn sparse_layers(keys: Keys<'_>) -> Result<impl Iterator<Item = bool>, ConfigError> {
    let step = keys.size(&["decoder_sparse_step"], usize::MAX)?.unwrap_or(1);
    let dense = dense_layers(keys)?;
    Ok((0_usize..).map(move |index| (index + 1).is_multiple_of(step) && !dense.contains(&(index as u64))))
}

/// Returns the layers that have an MLP regardless of `decoder_sparse_step`.
fn dense_layers(keys: Keys<'_>) -> Result<Vec<u64>, ConfigError> {
    let key = "mlp_only_layers";
    let Some(layers) = keys.get(key) else { return Ok(Vec::new()) };
    let numbers = layers.as_array().and_then(|layers| layers.iter().map(Value::as_u64).collect());
    numbers.ok_or_else(|| keys.wrong(key, "a list of layer indices, from 0"))
}
