//! The keys of a `llama`. Absent keys have the values that transformers gives them.

use super::error::ConfigError;
use super::keys::{Keys, divides};
use super::limits::{INNER_MAX, LAYERS_MAX, ROWS_MAX, WIDTH_MAX};
use crate::model::LlamaConfig;

pub(super) fn parse(keys: Keys<'_>) -> Result<LlamaConfig, ConfigError> {
    keys.only("hidden_act", "\"silu\"", |act| act == "silu" || act == "swish")?;
    keys.only_null("sliding_window")?;
    let hidden_size = keys.required_size(&["hidden_size"], WIDTH_MAX)?;
    let heads = keys.required_size(&["num_attention_heads"], WIDTH_MAX)?;
    let kv_heads = keys.size(&["num_key_value_heads"], WIDTH_MAX)?.unwrap_or(heads);
    divides(("num_attention_heads", heads), ("num_key_value_heads", kv_heads))?;
    Ok(LlamaConfig {
        vocab_size: keys.required_size(&["vocab_size"], ROWS_MAX)?,
        hidden_size,
        intermediate_size: keys.required_size(&["intermediate_size"], INNER_MAX)?,
        num_hidden_layers: keys.required_size(&["num_hidden_layers"], LAYERS_MAX)?,
        num_attention_heads: heads,
        num_key_value_heads: kv_heads,
        head_dim: head_dim(keys, hidden_size, heads)?,
        rms_norm_eps: keys.positive("rms_norm_eps", 1e-6)?,
        rope_theta: rope_theta(keys)?,
        tie_word_embeddings: keys.flag("tie_word_embeddings", false)?,
        attention_bias: keys.flag("attention_bias", false)?,
        mlp_bias: keys.flag("mlp_bias", false)?,
        attention_dropout: keys.probability("attention_dropout", 0.0)?,
        initializer_range: keys.initializer_range()?,
        max_position_embeddings: keys.size(&["max_position_embeddings"], ROWS_MAX)?.unwrap_or(2048),
    })
}

fn head_dim(keys: Keys<'_>, hidden_size: usize, heads: usize) -> Result<usize, ConfigError> {
    let head_dim = match keys.size(&["head_dim"], WIDTH_MAX)? {
        Some(head_dim) => head_dim,
        None => {
            divides(("hidden_size", hidden_size), ("num_attention_heads", heads))?;
            hidden_size / heads
        }
    };
    if head_dim * heads > WIDTH_MAX {
        let value = (head_dim * heads).to_string();
        return Err(ConfigError::TooLarge { key: "num_attention_heads * head_dim", value, limit: WIDTH_MAX });
    }
    if head_dim.is_multiple_of(2) {
        return Ok(head_dim);
    }
    let expected =
        "even (given, or hidden_size / num_attention_heads), because rotary positions pair elements";
    Err(ConfigError::Value { key: "head_dim", value: head_dim.to_string(), expected })
}

/// Where a kind of scaling may be named, and a part of the head that is rotated.
const ROPE_KEYS: [(&str, [&str; 2], &str); 2] = [
    ("rope_scaling", ["rope_scaling.rope_type", "rope_scaling.type"], "rope_scaling.partial_rotary_factor"),
    (
        "rope_parameters",
        ["rope_parameters.rope_type", "rope_parameters.type"],
        "rope_parameters.partial_rotary_factor",
    ),
];

/// The base of the rotary frequencies: `rope_parameters.rope_theta` since transformers 5, `rope_theta` before.
fn rope_theta(keys: Keys<'_>) -> Result<f64, ConfigError> {
    keys.only("partial_rotary_factor", "1", |factor| factor.as_f64() == Some(1.0))?;
    let before = keys.positive("rope_theta", 10000.0)?;
    for (key, kinds, factor) in ROPE_KEYS {
        let Some(rope) = keys.object(key)? else { continue };
        for kind in kinds {
            rope.only(kind, "\"default\" (no scaling of rotary positions)", |kind| kind == "default")?;
        }
        rope.only(factor, "1", |factor| factor.as_f64() == Some(1.0))?;
    }
    match keys.object("rope_parameters")? {
        Some(rope) => rope.positive("rope_parameters.rope_theta", before),
        None => Ok(before),
    }
}
