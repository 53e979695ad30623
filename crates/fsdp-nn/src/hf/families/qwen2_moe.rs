//! Qwen 2 and 1.5 with mixtures of experts, beside a shared expert with a weight.

use std::sync::Arc;

use super::Family;
use super::decoder::{self, Defaults, ROTARY_TABLES};
use super::qwen3_moe::sparse_layers;
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::hf::limits::INNER_MAX;
use crate::model::{DecoderConfig, Mixture, Names, SharedExpert};

pub(super) const FAMILY: Family = Family {
    model_type: "qwen2_moe",
    class: "Qwen2MoeForCausalLM",
    base_class: "Qwen2MoeModel",
    about: "Queries, keys and values have biases; mixtures of experts in every `decoder_sparse_step`-th layer, but not in \
            `mlp_only_layers`, beside a shared expert whose weight is the logistic function of a linear map; every other layer \
            of the first `max_window_layers` may have a window (`use_sliding_window`).",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const NAMES: Names = Names { class: "Qwen2Moe", shared_expert: "shared_expert", ..Names::LLAMA };
const DEFAULTS: Defaults = Defaults { kv_heads: Some(16), positions: 32768, ..Defaults::LLAMA };

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    let mut config = DecoderConfig {
        qkv_bias: keys.flag("qkv_bias", true)?,
        router_loss: decoder::router_loss(keys, 0.001)?,
        ..decoder::parse(keys, NAMES, &DEFAULTS)?
    };
    let inner = |key, absent| Ok(keys.size(&[key], INNER_MAX)?.unwrap_or(absent));
    let normalized = keys.flag("norm_topk_prob", false)?;
    let mixture = Mixture {
        shared: Some(SharedExpert {
            inner: inner("shared_expert_intermediate_size", 5632)?,
            is_weighed: true,
        }),
        ..Mixture::softmax(
            decoder::experts(keys, [60, 4])?,
            inner("moe_intermediate_size", 1408)?,
            normalized,
        )
    };
    for (layer, is_mixture) in config.layers.iter_mut().zip(sparse_layers(keys)?) {
        layer.mixture = is_mixture.then_some(mixture);
    }
    // Without windows, transformers writes a size of 0.
    let is_used = keys.flag("use_sliding_window", false)?;
    let window = if is_used { decoder::window(keys, Some(4096))? } else { None };
    let last = keys.count("max_window_layers", 28, usize::MAX)?;
    decoder::set_windows(keys, &mut config, window, |index, _| index.is_multiple_of(2) && index < last)?;
    Ok(config)
}
