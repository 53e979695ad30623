//! Gemma 3, text: like Gemma 2, with norms of queries and keys instead of caps, and separate rotary settings for
//! layers with a window, which are five of six.

use std::sync::Arc;

use super::Family;
use super::decoder::{Defaults, ROTARY_TABLES};
use super::gemma;
use super::rope::{self, Heads, Rotary};
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, QkNorm, RopeConfig};

pub(super) const FAMILY: Family = Family {
    model_type: "gemma3_text",
    class: "Gemma3ForCausalLM",
    base_class: "Gemma3TextModel",
    about: "As `gemma2`, with norms of queries and keys per head, and rarely with caps; five of six layers have a window, \
            and separate rotary positions (`rope_parameters.sliding_attention`, formerly `rope_local_base_freq`; \
            `rope_scaling` applies to the other layers).",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const DEFAULTS: Defaults = Defaults { positions: 131_072, ..gemma::DEFAULTS };
/// Rotary settings of layers without and with a window.
const FULL: Rotary = Rotary { theta: ("rope_theta", 1_000_000.0), ..Defaults::LLAMA.rotary };
const SLIDING: Rotary = Rotary { theta: ("rope_local_base_freq", 10_000.0), ..Defaults::LLAMA.rotary };

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    // Transformers reads this key but never uses it.
    keys.only_null("attn_logit_softcapping")?;
    let pattern = keys.size(&["sliding_window_pattern"], usize::MAX)?.unwrap_or(6);
    let base =
        gemma::parse(keys, gemma::names("Gemma3"), &DEFAULTS, pattern, |heads| full_rope(keys, heads))?;
    let heads = Heads { dim: base.head_dim, positions: base.max_position_embeddings };
    let sliding = Arc::new(sliding_rope(keys, &heads)?);
    let mut config = DecoderConfig {
        qk_norm: Some(QkNorm::Heads),
        logit_softcap: gemma::cap(keys, "final_logit_softcapping", None)?,
        ..base
    };
    for layer in &mut config.layers {
        if layer.window.is_some() {
            layer.rope = Some(sliding.clone());
        }
    }
    Ok(config)
}

/// Parses the rotary settings of layers without a window.
fn full_rope(keys: Keys<'_>, heads: &Heads) -> Result<RopeConfig, ConfigError> {
    let rope = match keys.object("rope_scaling")? {
        Some(scaling) => Some(scaling),
        None => rope::by_type(keys)?.inner_object("full_attention", "rope_parameters.full_attention")?,
    };
    rope::parse_object(keys, rope.unwrap_or(keys.absent("rope_parameters")), &FULL, heads)
}

/// Parses the rotary settings of layers with a window.
fn sliding_rope(keys: Keys<'_>, heads: &Heads) -> Result<RopeConfig, ConfigError> {
    let rope = rope::by_type(keys)?.inner_object("sliding_attention", "rope_parameters.sliding_attention")?;
    rope::parse_object(keys, rope.unwrap_or(keys.absent("rope_parameters")), &SLIDING, heads)
}
