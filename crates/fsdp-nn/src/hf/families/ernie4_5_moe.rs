//! ERNIE 4.5 with mixtures of experts, whose choice is corrected, beside shared experts.

use std::sync::Arc;

use super::Family;
use super::decoder::{self, Defaults, ROTARY_TABLES};
use super::ernie4_5;
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::hf::limits::{EXPERTS_MAX, INNER_MAX, LAYERS_MAX};
use crate::model::{DecoderConfig, Mixture, Names, SharedExpert};
use crate::op::Gating;

pub(super) const FAMILY: Family = Family {
    model_type: "ernie4_5_moe",
    class: "Ernie4_5_MoeForCausalLM",
    base_class: "Ernie4_5_MoeModel",
    about: "As `ernie4_5`, with mixtures of experts in every `moe_layer_interval`-th layer from `moe_layer_start_index` to \
            `moe_layer_end_index`; `e_score_correction_bias` corrects the probabilities for the choice; shared experts \
            (`moe_num_shared_experts`).",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const NAMES: Names = Names {
    class: "Ernie4_5_Moe",
    // The name in files; transformers 5 has it in the router.
    score_bias: ("moe_statics.e_score_correction_bias", 2),
    ..Names::LLAMA
};
const DEFAULTS: Defaults = Defaults { kv_heads: Some(4), head_dim: None, ..ernie4_5::DEFAULTS };

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    // The output head would have a bias, too.
    keys.only("use_bias", "false", |flag| flag.as_bool() == Some(false))?;
    keys.only("moe_norm_min", "1e-12", |least| least.as_f64() == Some(1e-12))?;
    // Transformers' loss counts the experts that would be chosen without the correction.
    keys.only("output_router_logits", "false", |flag| flag.as_bool() == Some(false))?;
    let mut config = ernie4_5::parse_with(keys, NAMES, &DEFAULTS)?;
    config.keep_f32 = decoder::ROUTERS;
    let spellings: [&[&str]; 2] = [&["moe_num_experts", "num_experts"], &["moe_k", "num_experts_per_tok"]];
    let experts = decoder::experts_of(keys, spellings, [64, 6])?;
    let inner = keys.size(&["moe_intermediate_size"], INNER_MAX)?.unwrap_or(1536);
    let shared = keys.count("moe_num_shared_experts", 2, EXPERTS_MAX)?;
    let mixture = Mixture {
        gating: Gating { biased: true, ..Gating::softmax(true) },
        shared: (shared > 0).then_some(SharedExpert { inner: shared * inner, is_weighed: false }),
        ..Mixture::softmax(experts, inner, true)
    };
    let interval = keys.size(&["moe_layer_interval"], LAYERS_MAX)?.unwrap_or(1);
    let first = keys.count("moe_layer_start_index", 1, LAYERS_MAX)?;
    let last = match keys.get("moe_layer_end_index").map(serde_json::Value::as_i64) {
        None | Some(Some(-1)) => config.layers.len() - 1,
        _ => keys.count("moe_layer_end_index", 0, LAYERS_MAX)?,
    };
    for (index, layer) in config.layers.iter_mut().enumerate() {
        let is_mixture = (index + 1).is_multiple_of(interval) && (first..=last).contains(&index);
        layer.mixture = is_mixture.then_some(mixture);
    }
    Ok(config)
}
