//! OLMo 3: as OLMo 2, with a window in three of four layers, which have separate rotary settings.

use std::sync::Arc;

use super::Family;
use super::decoder::{self, Defaults, ROTARY_TABLES};
use super::olmo2;
use super::rope::{self, Heads, Rotary};
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Names, QkNorm, RopeConfig};

pub(super) const FAMILY: Family = Family {
    model_type: "olmo3",
    class: "Olmo3ForCausalLM",
    base_class: "Olmo3Model",
    about: "As `olmo2`; three of four layers have a window, and separate rotary positions (`rope_parameters.sliding_attention`; \
            `rope_theta` and `rope_scaling` apply to the other layers).",
    base_prefix: "model.",
    constants: ROTARY_TABLES,
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const NAMES: Names = Names { class: "Olmo3", ..olmo2::NAMES };
/// Default base of the frequencies.
const THETA: f64 = 500_000.0;

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    let bias = keys.flag("attention_bias", false)?;
    keys.only("partial_rotary_factor", "1", |part| part.as_f64() == Some(1.0))?;
    let base = decoder::parse_rotated(keys, NAMES, &olmo2::DEFAULTS, |heads| full_rope(keys, heads))?;
    let heads = Heads { dim: base.head_dim, positions: base.max_position_embeddings };
    let sliding =
        rope::by_type(keys)?.inner_object("sliding_attention", "rope_parameters.sliding_attention")?;
    let sliding = Arc::new(parse_rope(keys, sliding, THETA, &heads)?);
    let mut config = DecoderConfig { qk_norm: Some(QkNorm::Rows), qkv_bias: bias, output_bias: bias, ..base };
    decoder::set_required_windows(keys, &mut config, 4)?;
    for layer in config.layers.iter_mut().filter(|layer| layer.window.is_some()) {
        layer.rope = Some(sliding.clone());
    }
    Ok(config)
}

/// Parses the rotary settings of layers without a window.
fn full_rope(keys: Keys<'_>, heads: &Heads) -> Result<RopeConfig, ConfigError> {
    let theta = keys.positive("rope_theta", THETA)?;
    let Some(scaling) = keys.object("rope_scaling")? else {
        let rope = rope::by_type(keys)?.inner_object("full_attention", "rope_parameters.full_attention")?;
        return parse_rope(keys, rope, theta, heads);
    };
    // Transformers adds these keys to `rope_parameters`, which has a `rope_type` then, even if it was absent: the older
    // `type` has no effect.
    keys.only_null("rope_parameters")?;
    if scaling.get("rope_type").is_none() {
        scaling.only_null("type")?;
    }
    parse_rope(keys, Some(scaling), theta, heads)
}

/// Parses an object of rotary positions. No outer key is read but the `theta` of layers without a window.
fn parse_rope(
    keys: Keys<'_>,
    rope: Option<Keys<'_>>,
    theta: f64,
    heads: &Heads,
) -> Result<RopeConfig, ConfigError> {
    let rope = rope.unwrap_or(keys.absent("rope_parameters"));
    let rotary = Rotary { theta: ("rope_theta", theta), ..Defaults::LLAMA.rotary };
    rope::parse_object(rope, rope, &rotary, heads)
}
