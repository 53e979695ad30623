//! GPT-NeoX and Pythia: layer norms, biases, packed projections ordered by head, partial rotation of heads, parallel
//! attention and MLP.

use std::sync::Arc;

use super::Family;
use super::decoder::{self, Defaults};
use super::rope::Rotary;
use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::model::{DecoderConfig, Names, NormKind, NormsPlace};
use crate::op::Function;

pub(super) const FAMILY: Family = Family {
    model_type: "gpt_neox",
    class: "GPTNeoXForCausalLM",
    base_class: "GPTNeoXModel",
    about: "GPT-NeoX and Pythia: layer norms, biases, an MLP without a gate, attention and MLP in parallel, a part of each head rotates \
            (`rotary_pct`).",
    base_prefix: "gpt_neox.",
    constants: &[".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"],
    parse: |keys| Ok(Arc::new(parse(keys)?)),
};

const NAMES: Names = Names {
    class: "GPTNeoX",
    layer_class: "Layer",
    model: "gpt_neox",
    embedding: "embed_in",
    last_norm: "final_layer_norm",
    // The name in checkpoint files; transformers 5 uses another one in memory.
    head: "embed_out",
    attention: "attention",
    qkv: &["query_key_value"],
    output: "dense",
    gate_up: &["dense_h_to_4h"],
    down: "dense_4h_to_h",
    norms: NormsPlace::BeforeAttention,
    ..Names::LLAMA
};
const DEFAULTS: Defaults = Defaults {
    kv_heads: None,
    activation: ("hidden_act", Function::Gelu),
    eps: ("layer_norm_eps", 1e-5),
    padding: None,
    rotary: Rotary {
        theta: ("rotary_emb_base", 10000.0),
        partial: Some(("rotary_pct", 0.25)),
        ..Defaults::LLAMA.rotary
    },
    ..Defaults::LLAMA
};

pub(super) fn parse(keys: Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    let bias = keys.flag("attention_bias", true)?;
    let dropout = keys.probability("hidden_dropout", 0.0)?;
    // Transformers does not read this key.
    keys.only_null("head_dim")?;
    let base = decoder::parse(keys, NAMES, &DEFAULTS)?;
    Ok(DecoderConfig {
        num_key_value_heads: base.num_attention_heads,
        is_parallel: keys.flag("use_parallel_residual", true)?,
        norm: NormKind::Layer,
        qkv_by_head: true,
        is_gated: false,
        qkv_bias: bias,
        output_bias: bias,
        mlp_bias: true,
        residual_dropout: dropout,
        embedding_dropout: dropout,
        ..base
    })
}
