//! Qwen 3 Next: linear attention in most layers, attention with gates in the others, and mixtures of experts.

use std::sync::Arc;

use super::Family;
use super::decoder::{self, ROTARY_TABLES};
use super::delta::{self, DEFAULTS};
use super::qwen3_moe::sparse_layers;
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Names};

pub(super) const FAMILY: Family = Family {
    model_type: "qwen3_next",
    class: "Qwen3NextForCausalLM",
    base_class: "Qwen3NextModel",
    about: "Linear attention (gated delta rule) in all but every `full_attention_interval`-th layer, or as `layer_types` lists; \
            attention with a gate, norms of queries and keys per head and partial rotation in the others; mixtures of experts in \
            every `decoder_sparse_step`-th layer, but not in `mlp_only_layers`, beside a shared expert with a weight.",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const NAMES: Names = Names { class: "Qwen3Next", shared_expert: "shared_expert", ..Names::LLAMA };

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    let mut config = delta::parse(keys, NAMES, &DEFAULTS, true)?;
    config.router_loss = decoder::router_loss(keys, 0.001)?;
    let mixture = delta::mixture(keys, [512, 10], keys.flag("norm_topk_prob", true)?)?;
    for (layer, is_mixture) in config.layers.iter_mut().zip(sparse_layers(keys)?) {
        layer.mixture = is_mixture.then_some(mixture);
    }
    Ok(config)
}
