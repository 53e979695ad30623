//! What the families of Gemma share.

use super::decoder::{self, Defaults};
use super::rope::Heads;
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Names, NormKind, RopeConfig};
use crate::op::Function;

/// Keys that a query sees at most in the layers that have a window, where no key says it.
const WINDOW: usize = 4096;

/// The names of the modules, under classes that begin with `class`.
pub(super) const fn names(class: &'static str) -> Names {
    Names {
        class,
        after_attention: Some("post_attention_layernorm"),
        before_mlp: Some("pre_feedforward_layernorm"),
        after_mlp: Some("post_feedforward_layernorm"),
        ..Names::LLAMA
    }
}

/// What absent keys stand for.
pub(super) const DEFAULTS: Defaults = Defaults {
    kv_heads: Some(4),
    head_dim: Some(256),
    activation: ("hidden_activation", Function::GeluTanh),
    tied: true,
    ..Defaults::LLAMA
};

/// Reads what the families share. Layers have windows by `layer_types`, or where that is absent all but every
/// `pattern`-th. The cap of logits is read by whoever knows what its absence means.
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
        embedding_scale: (base.hidden_size as f64).sqrt(),
        attention_scale: Some(keys.positive("query_pre_attn_scalar", 256.0)?.powf(-0.5)),
        qkv_bias: bias,
        output_bias: bias,
        ..base
    };
    let window = decoder::window(keys, Some(WINDOW))?;
    if window.is_none() {
        return Err(keys.unsupported("sliding_window", "a number of keys"));
    }
    decoder::set_windows(keys, &mut config, window, |index, _| !(index + 1).is_multiple_of(pattern))?;
    Ok(config)
}

/// A cap, which `null` takes away.
pub(super) fn cap(keys: Keys<'_>, key: &str, absent: Option<f64>) -> Result<Option<f64>, ConfigError> {
    let absent = absent.filter(|_| !keys.contains(key));
    Ok(keys.optional_number(key, "a positive number", |cap| cap > 0.0)?.or(absent))
}
