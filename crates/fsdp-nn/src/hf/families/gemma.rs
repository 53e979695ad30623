//! The common part of the Gemma families.

use super::decoder::{self, Defaults};
use super::rope::Heads;
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Names, NormKind, RopeConfig};
use crate::op::Function;

/// Returns the names of the modules, with the class prefix `class`.
pub(super) const fn names(class: &'static str) -> Names {
    Names {
        class,
        after_attention: Some("post_attention_layernorm"),
        before_mlp: Some("pre_feedforward_layernorm"),
        after_mlp: Some("post_feedforward_layernorm"),
        ..Names::LLAMA
    }
}

/// Defaults of absent keys.
pub(super) const DEFAULTS: Defaults = Defaults {
    kv_heads: Some(4),
    head_dim: Some(256),
    activation: ("hidden_activation", Function::GeluTanh),
    tied: true,
    padding: Some((decoder::PAD_TOKEN, Some(0))),
    ..Defaults::LLAMA
};

/// Parses the common keys. `layer_types` selects the layers with a window; if it is absent, these are all but every
/// `pattern`-th layer. The caller parses the cap of the logits, whose default differs.
pub(super) fn parse(
    keys: Keys<'_>,
    names: Names,
    defaults: &Defaults,
    pattern: usize,
    rope: impl FnOnce(&Heads) -> Result<RopeConfig, ConfigError>,
) -> Result<DecoderConfig, ConfigError> {
    keys.only_false("use_bidirectional_attention")?;
    let bias = keys.flag("attention_bias", false)?;
    let base = decoder::parse_rotated(keys, names, defaults, rope)?;
    let mut config = DecoderConfig {
        norm: NormKind::CentredRms,
        embedding_scale_rounds: true,
        embedding_scale: (base.hidden_size as f64).sqrt(),
        attention_scale: Some(keys.positive("query_pre_attn_scalar", 256.0)?.powf(-0.5)),
        qkv_bias: bias,
        output_bias: bias,
        ..base
    };
    decoder::set_required_windows(keys, &mut config, pattern)?;
    Ok(config)
}

/// Parses a soft cap; an explicit `null` means no cap.
pub(super) fn cap(keys: Keys<'_>, key: &str, absent: Option<f64>) -> Result<Option<f64>, ConfigError> {
    let absent = absent.filter(|_| !keys.contains(key));
    Ok(keys.optional_number(key, "a positive number", |cap| cap > 0.0)?.or(absent))
}
