//! MiniMax M2: a Mixtral whose router has corrected logistic scores, with norms of all queries and all keys of a token.

use std::sync::Arc;

use super::Family;
use super::decoder::{self, Defaults, ROTARY_TABLES};
use super::rope::Rotary;
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Mixture, Names, QkNorm};
use crate::op::{Gating, Scoring};

pub(super) const FAMILY: Family = Family {
    model_type: "minimax_m2",
    class: "MiniMaxM2ForCausalLM",
    base_class: "MiniMaxM2Model",
    about: "Mixtures of experts in all layers, with logistic scores that `e_score_correction_bias` corrects for the choice; queries \
            and keys have norms over all heads; a part of each head rotates (`partial_rotary_factor`).",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const NAMES: Names = Names {
    class: "MiniMaxM2",
    mlp: "block_sparse_moe",
    gate_up: &["w1", "w3"],
    down: "w2",
    score_bias: ("e_score_correction_bias", 1),
    ..Names::LLAMA
};
const DEFAULTS: Defaults = Defaults {
    kv_heads: Some(8),
    head_dim: Some(128),
    positions: 196_608,
    rotary: Rotary {
        theta: ("rope_theta", 5_000_000.0),
        partial: Some(("partial_rotary_factor", 1.0)),
        ..Defaults::LLAMA.rotary
    },
    ..Defaults::LLAMA
};

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    keys.only("router_jitter_noise", "0", |noise| noise.as_f64() == Some(0.0))?;
    // Transformers' loss counts the experts that a softmax would choose, which are not those that are used.
    keys.only("output_router_logits", "false", |flag| flag.as_bool() == Some(false))?;
    let mut config = DecoderConfig { qk_norm: Some(QkNorm::Rows), ..decoder::parse(keys, NAMES, &DEFAULTS)? };
    let rope = config.layers[0].rope.as_ref().map_or(0, |rope| rope.rotary_dim(config.head_dim));
    // Transformers does not read this key, which published files have.
    keys.only("rotary_dim", "`partial_rotary_factor` times `head_dim`", |dim| {
        dim.as_u64() == Some(rope as u64)
    })?;
    let gating = Gating { scoring: Scoring::Sigmoid, biased: true, ..Gating::softmax(true) };
    let experts = decoder::experts(keys, [256, 8])?;
    let mixture = Mixture { gating, ..Mixture::softmax(experts, config.intermediate_size, true) };
    config.layers.iter_mut().for_each(|layer| layer.mixture = Some(mixture));
    // Published files have these in f32.
    config.keep_f32 = &["block_sparse_moe.gate.weight", "e_score_correction_bias"];
    Ok(config)
}
