//! Parses the keys of latent attention, and of the mixtures beside it: DeepSeek V3 and its relatives.

use super::{decoder, rope};
use crate::hf::error::ConfigError;
use crate::hf::keys::{Keys, divides};
use crate::hf::limits::{INNER_MAX, LAYERS_MAX, WIDTH_MAX};
use crate::model::{DecoderConfig, LatentAttention, Mixture, SharedExpert};
use crate::op::{Gating, Groups, Scoring};

/// Parses the sizes of latent attention.
pub(super) fn attention(keys: Keys<'_>) -> Result<LatentAttention, ConfigError> {
    let size = |key| keys.required_size(&[key], WIDTH_MAX);
    let rank = "q_lora_rank";
    let rotating = size("qk_rope_head_dim")?;
    if !rotating.is_multiple_of(2) {
        return Err(keys.wrong("qk_rope_head_dim", "even, because rotary positions pair elements"));
    }
    Ok(LatentAttention {
        // An explicit null means one projection.
        query_rank: if keys.contains(rank) { keys.size(&[rank], WIDTH_MAX)? } else { Some(size(rank)?) },
        kv_rank: size("kv_lora_rank")?,
        fixed: size("qk_nope_head_dim")?,
        rotating,
        value: size("v_head_dim")?,
        interleaved: keys.flag("rope_interleave", true)?,
    })
}

/// The factor of scores: that of the head, times the square of YaRN's factor for all elements.
pub(super) fn attention_scale(keys: Keys<'_>, latent: &LatentAttention) -> Result<f64, ConfigError> {
    let rope = match keys.object("rope_scaling")? {
        Some(rope) => rope,
        None => keys.object("rope_parameters")?.unwrap_or(keys.absent("rope_parameters")),
    };
    let scale = 1.0 / ((latent.fixed + latent.rotating) as f64).sqrt();
    let multiplier =
        rope.optional_number("mscale_all_dim", "a non-negative number", |number| number >= 0.0)?;
    let kind = rope.text("rope_type")?.or(rope.text("type")?);
    let Some(multiplier) = multiplier.filter(|_| kind.is_some_and(|kind| kind != "default")) else {
        return Ok(scale);
    };
    let factor = rope::factor(rope)?;
    Ok(if factor > 1.0 { scale * (0.1 * multiplier * factor.ln() + 1.0).powi(2) } else { scale })
}

/// The defaults of the keys of a mixture that differ between families.
pub(super) struct MixtureDefaults {
    /// `n_routed_experts` and `num_experts_per_tok`.
    pub(super) experts: [usize; 2],
    /// `moe_intermediate_size`.
    pub(super) inner: usize,
    /// `routed_scaling_factor`.
    pub(super) scale: f64,
    /// `n_group` and `topk_group`.
    pub(super) groups: Groups,
}

/// Parses mixtures with logistic scores, corrections and groups, beside shared experts.
pub(super) fn mixture(keys: Keys<'_>, defaults: &MixtureDefaults) -> Result<Mixture, ConfigError> {
    // Transformers ignores these keys of published files, and has no other values.
    keys.only("scoring_func", "\"sigmoid\"", |name| name == "sigmoid")?;
    keys.only("topk_method", "\"noaux_tc\"", |name| name == "noaux_tc")?;
    keys.only("moe_layer_freq", "1", |step| step.as_u64() == Some(1))?;
    let [experts, top] = decoder::experts_of(
        keys,
        [&["n_routed_experts", "num_local_experts"], &["num_experts_per_tok"]],
        defaults.experts,
    )?;
    let inner = keys.size(&["moe_intermediate_size"], INNER_MAX)?.unwrap_or(defaults.inner);
    let count = keys.size(&["n_group"], experts)?.unwrap_or(defaults.groups.count);
    divides(("n_routed_experts", experts), ("n_group", count))?;
    if count > 1 && experts < 2 * count {
        return Err(
            keys.wrong("n_group", "at most half of the experts: a group counts as much as its best two")
        );
    }
    let groups = Groups { count, top: keys.size(&["topk_group"], count)?.unwrap_or(defaults.groups.top) };
    if groups.top > groups.count || top > groups.top * (experts / groups.count) {
        return Err(
            keys.wrong("topk_group", "at most `n_group`, with enough experts for `num_experts_per_tok`")
        );
    }
    let shared = keys.size(&["n_shared_experts"], experts)?.unwrap_or(1);
    let normalized = keys.flag("norm_topk_prob", true)?;
    Ok(Mixture {
        gating: Gating { scoring: Scoring::Sigmoid, biased: true, groups, normalized },
        scale: keys.positive("routed_scaling_factor", defaults.scale)?,
        shared: Some(SharedExpert { inner: shared * inner, is_weighed: false }),
        ..Mixture::softmax([experts, top], inner, normalized)
    })
}

/// Sets the mixture of all layers but the first ones, which have an MLP.
pub(super) fn set_mixtures(
    keys: Keys<'_>,
    config: &mut DecoderConfig,
    mixture: Mixture,
    dense: usize,
) -> Result<(), ConfigError> {
    let dense = keys.count("first_k_dense_replace", dense, LAYERS_MAX)?;
    for layer in config.layers.iter_mut().skip(dense) {
        layer.mixture = Some(mixture);
    }
    Ok(())
}
