//! The keys of a `gpt2`, in all spellings that transformers accepts.

use std::sync::Arc;

use super::Family;
use crate::hf::error::ConfigError;
use crate::hf::keys::{Keys, divides};
use crate::hf::limits::{INNER_MAX, LAYERS_MAX, ROWS_MAX, WIDTH_MAX};
use crate::model::Gpt2Config;

pub(super) const FAMILY: Family = Family {
    model_type: "gpt2",
    class: "GPT2LMHeadModel",
    base_class: "GPT2Model",
    about: "Learned positions, layer norms, GELU in the tanh form, dropouts.",
    base_prefix: "transformer.",
    constants: &[".attn.bias", ".attn.masked_bias"],
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

fn parse(keys: Keys<'_>) -> Result<Gpt2Config, ConfigError> {
    keys.only("activation_function", "\"gelu_new\"", |act| act == "gelu_new" || act == "gelu_pytorch_tanh")?;
    keys.only("scale_attn_weights", "true", |flag| flag == &serde_json::Value::Bool(true))?;
    keys.only_false("scale_attn_by_inverse_layer_idx")?;
    keys.only_false("reorder_and_upcast_attn")?;
    let n_embd = keys.required_size(&["n_embd", "hidden_size"], WIDTH_MAX)?;
    let n_head = keys.required_size(&["n_head", "num_attention_heads"], WIDTH_MAX)?;
    divides(("n_embd", n_embd), ("n_head", n_head))?;
    Ok(Gpt2Config {
        vocab_size: keys.required_size(&["vocab_size"], ROWS_MAX)?,
        n_positions: keys.required_size(&["n_positions", "max_position_embeddings"], ROWS_MAX)?,
        n_embd,
        n_layer: keys.required_size(&["n_layer", "num_hidden_layers"], LAYERS_MAX)?,
        n_head,
        n_inner: keys.size(&["n_inner"], INNER_MAX)?.unwrap_or(4 * n_embd),
        layer_norm_epsilon: keys.positive("layer_norm_epsilon", 1e-5)?,
        embd_pdrop: keys.probability("embd_pdrop", 0.1)?,
        attn_pdrop: keys.probability("attn_pdrop", 0.1)?,
        resid_pdrop: keys.probability("resid_pdrop", 0.1)?,
        tie_word_embeddings: keys.flag("tie_word_embeddings", true)?,
        initializer_range: keys.initializer_range(0.02)?,
    })
}
