//! Parses the keys that decoders share. Absent keys have the default values of transformers, which differ between
//! some families.

use std::sync::Arc;

use serde_json::Value;

use super::latent;
use super::rope::{self, Heads, Rotary};
use crate::hf::error::ConfigError;
use crate::hf::keys::{Keys, divides};
use crate::hf::limits::{EXPERTS_MAX, INNER_MAX, LAYERS_MAX, ROWS_MAX, WIDTH_MAX};
use crate::model::{DecoderConfig, LayerConfig, Names, NormKind, RopeConfig};
use crate::op::Function;

/// The ends of the names of routers' weights and of what corrects their scores, for [`DecoderConfig::keep_f32`].
pub(super) const ROUTERS: &[&str] = &["mlp.gate.weight", "e_score_correction_bias"];
/// Name suffixes of tensors that are rotary tables of older versions.
pub(super) const ROTARY_TABLES: &[&str] = &[".rotary_emb.inv_freq"];

/// The key of the epsilon of RMS norms.
pub(super) const RMS_EPS: &str = "rms_norm_eps";

/// The key of the token that pads samples.
pub(super) const PAD_TOKEN: &str = "pad_token_id";

/// Defaults of absent keys, and names of keys that differ between families.
pub(super) struct Defaults {
    /// `num_key_value_heads`. `None` for the number of query heads, which an explicit `null` always means.
    pub(super) kv_heads: Option<usize>,
    /// `head_dim`. `None` for `hidden_size / num_attention_heads`, which an explicit `null` always means.
    pub(super) head_dim: Option<usize>,
    /// Whether attention is latent, and has its own sizes instead of `head_dim` and `num_key_value_heads`.
    pub(super) is_latent: bool,
    /// The key of the MLP's activation, and its default.
    pub(super) activation: (&'static str, Function),
    /// The key of the norms' epsilon, and its default.
    pub(super) eps: (&'static str, f64),
    /// Keys and defaults of rotary positions.
    pub(super) rotary: Rotary,
    /// The key of the inner width of the MLP, or of an expert where no layer has an MLP.
    pub(super) inner: &'static str,
    /// `max_position_embeddings`.
    pub(super) positions: usize,
    /// `tie_word_embeddings`.
    pub(super) tied: bool,
    /// The key of the token whose row of the embedding is for padding, and its default; an explicit `null` always means
    /// that there is none. `None` if the family has no such row.
    pub(super) padding: Option<(&'static str, Option<usize>)>,
}

impl Defaults {
    /// The defaults of Llama.
    pub(super) const LLAMA: Defaults = Defaults {
        kv_heads: None,
        head_dim: None,
        is_latent: false,
        activation: ("hidden_act", Function::Silu),
        eps: (RMS_EPS, 1e-6),
        rotary: Rotary { theta: ("rope_theta", 10000.0), partial: None, more: &[], phi3_original: None },
        inner: "intermediate_size",
        positions: 2048,
        tied: false,
        padding: Some((PAD_TOKEN, None)),
    };
}

/// Parses the keys of all decoders. In the result every layer is rotated, nothing has a bias, norms are RMS norms,
/// and the MLP has a gate.
pub(super) fn parse(keys: Keys<'_>, names: Names, defaults: &Defaults) -> Result<DecoderConfig, ConfigError> {
    parse_rotated(keys, names, defaults, |heads| rope::parse(keys, &defaults.rotary, heads))
}

/// As [`parse`], for families with their own keys for the rotation of layers.
pub(super) fn parse_rotated(
    keys: Keys<'_>,
    names: Names,
    defaults: &Defaults,
    rope: impl FnOnce(&Heads) -> Result<RopeConfig, ConfigError>,
) -> Result<DecoderConfig, ConfigError> {
    let hidden_size = keys.required_size(&["hidden_size"], WIDTH_MAX)?;
    let heads = keys.required_size(&["num_attention_heads"], WIDTH_MAX)?;
    let latent = if defaults.is_latent { Some(latent::attention(keys)?) } else { None };
    let (kv_heads, head_dim, rotated) = match &latent {
        Some(latent) => {
            let supported = "`num_attention_heads`";
            keys.only("num_key_value_heads", supported, |number| number.as_u64() == Some(heads as u64))?;
            (heads, within_limit(heads, (latent.fixed + latent.rotating).max(latent.value))?, latent.rotating)
        }
        None => {
            let head_dim = head_dim(keys, defaults, hidden_size, heads)?;
            (kv_heads(keys, defaults, heads)?, head_dim, head_dim)
        }
    };
    let attention_scale = match &latent {
        Some(latent) => Some(latent::attention_scale(keys, latent)?),
        None => None,
    };
    let positions = keys.size(&["max_position_embeddings"], ROWS_MAX)?.unwrap_or(defaults.positions);
    let rope = Arc::new(rope(&Heads { dim: rotated, positions })?);
    let layers = keys.required_size(&["num_hidden_layers"], LAYERS_MAX)?;
    let vocab_size = keys.required_size(&["vocab_size"], ROWS_MAX)?;
    Ok(DecoderConfig {
        names,
        vocab_size,
        padding_row: padding_row(keys, defaults, vocab_size)?,
        embedding_scale: 1.0,
        embedding_scale_rounds: false,
        embedding_dropout: 0.0,
        hidden_size,
        intermediate_size: keys.required_size(&[defaults.inner], INNER_MAX)?,
        num_attention_heads: heads,
        num_key_value_heads: kv_heads,
        head_dim,
        latent,
        layers: vec![LayerConfig { rope: Some(rope), window: None, mixture: None, delta: None }; layers],
        is_parallel: false,
        qk_norm: None,
        qkv_by_head: false,
        rotates_neighbors: false,
        attention_scale,
        attention_softcap: None,
        residual_scale: 1.0,
        logit_scale: 1.0,
        logit_softcap: None,
        is_gated: true,
        activation: activation(keys, defaults.activation)?,
        norm: NormKind::Rms,
        norm_eps: keys.positive(defaults.eps.0, defaults.eps.1)?,
        tie_word_embeddings: keys.flag("tie_word_embeddings", defaults.tied)?,
        qkv_bias: false,
        output_bias: false,
        sinks: false,
        attention_gate: false,
        mlp_bias: false,
        attention_dropout: keys.probability("attention_dropout", 0.0)?,
        residual_dropout: 0.0,
        router_loss: 0.0,
        keep_f32: &[],
        initializer_range: keys.initializer_range(0.02)?,
        max_position_embeddings: positions,
    })
}

/// Parses the row of the embedding that inputs give no gradient (`padding_idx` of PyTorch). A negative token counts from
/// the end, as there. A default beyond the vocabulary means that there is no such row.
fn padding_row(keys: Keys<'_>, defaults: &Defaults, vocab: usize) -> Result<Option<usize>, ConfigError> {
    let Some((key, absent)) = defaults.padding else { return Ok(None) };
    let Some(id) = keys.get(key) else {
        return Ok(absent.filter(|&row| !keys.contains(key) && row < vocab));
    };
    let row = id.as_i64().and_then(|id| {
        let row = if id < 0 { vocab.checked_sub(id.unsigned_abs() as usize) } else { Some(id as usize) };
        row.filter(|&row| row < vocab)
    });
    row.map(Some).ok_or_else(|| keys.wrong(key, "a token of the vocabulary (`vocab_size`), or null"))
}

/// Refuses layers of any type other than full attention, such as those with a window.
pub(super) fn only_full_attention(keys: Keys<'_>) -> Result<(), ConfigError> {
    let is_full = |types: &Value| {
        types.as_array().is_some_and(|types| types.iter().all(|each| each == "full_attention"))
    };
    keys.only("layer_types", "\"full_attention\" in every layer", is_full)
}

/// Parses `sliding_window`, the maximum number of keys that a query sees. An explicit `null` means no window;
/// `absent` applies if the key is absent.
pub(super) fn window(keys: Keys<'_>, absent: Option<usize>) -> Result<Option<usize>, ConfigError> {
    let absent = absent.filter(|_| !keys.contains("sliding_window"));
    Ok(keys.size(&["sliding_window"], ROWS_MAX)?.or(absent))
}

/// Sets the window of the layers that `layer_types` calls `sliding_attention` or, if that key is absent, of all but
/// every `pattern`-th. The window is 4096 if `sliding_window` is absent; transformers cannot do without.
pub(super) fn set_required_windows(
    keys: Keys<'_>,
    config: &mut DecoderConfig,
    pattern: usize,
) -> Result<(), ConfigError> {
    let window = window(keys, Some(4096))?;
    if window.is_none() {
        return Err(keys.unsupported("sliding_window", "a number of keys"));
    }
    set_windows(keys, config, window, |index, _| !(index + 1).is_multiple_of(pattern))
}

/// Sets the window of the layers that `layer_types` calls `sliding_attention` or, if that key is absent, of those
/// selected by `has_window`.
pub(super) fn set_windows(
    keys: Keys<'_>,
    config: &mut DecoderConfig,
    window: Option<usize>,
    has_window: impl Fn(usize, &LayerConfig) -> bool,
) -> Result<(), ConfigError> {
    let key = "layer_types";
    let Some(types) = keys.get(key) else {
        for (index, layer) in config.layers.iter_mut().enumerate() {
            layer.window = window.filter(|_| has_window(index, layer));
        }
        return Ok(());
    };
    let types = types.as_array().filter(|types| types.len() == config.layers.len());
    let types = types.ok_or_else(|| keys.wrong(key, "a list with the type of each layer"))?;
    for (layer, kind) in config.layers.iter_mut().zip(types) {
        layer.window = match (kind.as_str(), window) {
            (Some("full_attention"), _) => None,
            (Some("sliding_attention"), Some(window)) => Some(window),
            (Some("sliding_attention"), None) => {
                return Err(keys.unsupported(key, "\"full_attention\" where there is no window"));
            }
            _ => return Err(keys.unsupported(key, "\"full_attention\" and \"sliding_attention\"")),
        };
    }
    Ok(())
}

/// Parses the coefficient of the routers' balancing loss. As in transformers, the loss is used only if router logits
/// are requested.
pub(super) fn router_loss(keys: Keys<'_>, absent: f64) -> Result<f64, ConfigError> {
    let expected = "a non-negative number";
    let coefficient =
        keys.number("router_aux_loss_coef", absent, expected, |coefficient| coefficient >= 0.0)?;
    Ok(if keys.flag("output_router_logits", false)? { coefficient } else { 0.0 })
}

/// Parses the number of experts, and the number of experts per token.
pub(super) fn experts(keys: Keys<'_>, defaults: [usize; 2]) -> Result<[usize; 2], ConfigError> {
    experts_of(keys, [&["num_local_experts", "num_experts"], &["num_experts_per_tok"]], defaults)
}

/// As [`experts`], with the spellings of both keys.
pub(super) fn experts_of(
    keys: Keys<'_>,
    [of_experts, of_top]: [&[&str]; 2],
    [experts, top]: [usize; 2],
) -> Result<[usize; 2], ConfigError> {
    let experts = keys.size(of_experts, EXPERTS_MAX)?.unwrap_or(experts);
    let top = keys.size(of_top, EXPERTS_MAX)?.unwrap_or(top);
    if top > experts {
        return Err(keys.wrong(of_top[0], "at most the number of experts"));
    }
    Ok([experts, top])
}

/// Parses the activation of the MLP.
fn activation(keys: Keys<'_>, (key, absent): (&str, Function)) -> Result<Function, ConfigError> {
    let named = |name: &Value| match name.as_str() {
        Some("silu" | "swish") => Some(Function::Silu),
        Some("gelu") => Some(Function::Gelu),
        Some("gelu_new" | "gelu_fast" | "gelu_pytorch_tanh") => Some(Function::GeluTanh),
        Some("relu") => Some(Function::Relu),
        _ => None,
    };
    let supported = "\"silu\", \"gelu\", \"gelu_pytorch_tanh\" and \"relu\"";
    keys.only(key, supported, |name| named(name).is_some())?;
    Ok(keys.get(key).and_then(named).unwrap_or(absent))
}

fn kv_heads(keys: Keys<'_>, defaults: &Defaults, heads: usize) -> Result<usize, ConfigError> {
    let absent = defaults.kv_heads.filter(|_| !keys.contains("num_key_value_heads"));
    let kv_heads = keys.size(&["num_key_value_heads"], WIDTH_MAX)?.or(absent).unwrap_or(heads);
    divides(("num_attention_heads", heads), ("num_key_value_heads", kv_heads))?;
    Ok(kv_heads)
}

/// Refuses heads that are too large together.
fn within_limit(heads: usize, head_dim: usize) -> Result<usize, ConfigError> {
    if head_dim * heads <= WIDTH_MAX {
        return Ok(head_dim);
    }
    let (key, value) = ("num_attention_heads * head_dim".to_owned(), (head_dim * heads).to_string());
    Err(ConfigError::TooLarge { key, value, limit: WIDTH_MAX })
}

fn head_dim(
    keys: Keys<'_>,
    defaults: &Defaults,
    hidden_size: usize,
    heads: usize,
) -> Result<usize, ConfigError> {
    let absent = defaults.head_dim.filter(|_| !keys.contains("head_dim"));
    let head_dim = match keys.size(&["head_dim"], WIDTH_MAX)?.or(absent) {
        Some(head_dim) => head_dim,
        None => {
            divides(("hidden_size", hidden_size), ("num_attention_heads", heads))?;
            hidden_size / heads
        }
    };
    within_limit(heads, head_dim)?;
    if head_dim.is_multiple_of(2) {
        return Ok(head_dim);
    }
    let expected =
        "even (given, or hidden_size / num_attention_heads), because rotary positions pair elements";
    Err(ConfigError::Value { key: "head_dim".to_owned(), value: head_dim.to_string(), expected })
}
