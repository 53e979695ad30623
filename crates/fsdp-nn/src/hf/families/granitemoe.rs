//! Granite 3 with mixtures of experts.

use std::sync::Arc;

use super::Family;
use super::decoder::{self, ROTARY_TABLES};
use super::granite;
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Mixture, Names, NormsPlace};

pub(super) const FAMILY: Family = Family {
    model_type: "granitemoe",
    class: "GraniteMoeForCausalLM",
    base_class: "GraniteMoeModel",
    about: "As `granite`, with mixtures of experts in all layers (`num_local_experts`, `num_experts_per_tok`), whose weights sum to \
            one; their weights are stacked in files.",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const NAMES: Names = Names {
    class: "GraniteMoe",
    mlp: "block_sparse_moe",
    // The name in files; it is shorter in memory.
    router: "router.layer",
    norms: NormsPlace::BeforeMlp,
    ..Names::LLAMA
};

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    // Transformers has no such loss for this family: its models do not return what routers say, and training fails.
    keys.only("output_router_logits", "false", |flag| flag.as_bool() == Some(false))?;
    let mut config = granite::parse_with(keys, NAMES)?;
    let mixture = Mixture::softmax(decoder::experts(keys, [8, 2])?, config.intermediate_size, true);
    config.layers.iter_mut().for_each(|layer| layer.mixture = Some(mixture));
    Ok(config)
}
