//! Mixtral: a Mistral with mixtures of experts instead of MLPs.

use std::sync::Arc;

use super::Family;
use super::decoder::{self, Defaults, ROTARY_TABLES};
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Mixture, Names};

pub(super) const FAMILY: Family = Family {
    model_type: "mixtral",
    class: "MixtralForCausalLM",
    base_class: "MixtralModel",
    about: "Mixtures of experts (`num_local_experts`, `num_experts_per_tok`), whose weights sum to one; all layers may have a window.",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

// The names in checkpoint files; transformers 5 stacks the weights of experts in memory.
const NAMES: Names =
    Names { class: "Mixtral", mlp: "block_sparse_moe", gate_up: &["w1", "w3"], down: "w2", ..Names::LLAMA };
const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(8), eps: (decoder::RMS_EPS, 1e-5), positions: 4096 * 32, ..Defaults::LLAMA };

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    decoder::only_full_attention(keys)?;
    keys.only("router_jitter_noise", "0", |noise| noise.as_f64() == Some(0.0))?;
    let mut config = decoder::parse(keys, NAMES, &DEFAULTS)?;
    config.router_loss = decoder::router_loss(keys, 0.001)?;
    let mixture = Mixture::softmax(decoder::experts(keys, [8, 2])?, config.intermediate_size, true);
    let window = decoder::window(keys, None)?;
    for layer in &mut config.layers {
        (layer.window, layer.mixture) = (window, Some(mixture));
    }
    Ok(config)
}
