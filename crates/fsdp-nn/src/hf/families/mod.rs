//! The table of model families. A family is one file in this directory and one entry in the table.

mod cohere2;
mod decoder;
mod deepseek_v3;
mod delta;
mod ernie4_5;
mod ernie4_5_moe;
mod exaone4;
mod family;
mod gemma;
mod gemma2;
mod gemma3_text;
mod glm4;
mod glm4_moe;
mod glm4_moe_lite;
mod gpt2;
mod gpt_neox;
mod gpt_oss;
mod granite;
mod granitemoe;
mod hunyuan_v1_dense;
mod latent;
mod llama;
mod minimax_m2;
mod mistral;
mod mixtral;
mod olmo2;
mod olmo3;
mod olmoe;
mod phi3;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_5_moe_text;
mod qwen3_5_text;
mod qwen3_moe;
mod qwen3_next;
mod rope;
mod seed_oss;
mod smollm3;
mod starcoder2;

use serde_json::Value;

use crate::hf::error::ConfigError;
pub use family::Family;

/// The supported families, ordered by name.
pub const FAMILIES: &[Family] = &[
    cohere2::FAMILY,
    deepseek_v3::FAMILY,
    ernie4_5::FAMILY,
    ernie4_5_moe::FAMILY,
    exaone4::FAMILY,
    gemma2::FAMILY,
    gemma3_text::FAMILY,
    glm4::FAMILY,
    glm4_moe::FAMILY,
    glm4_moe_lite::FAMILY,
    gpt2::FAMILY,
    gpt_neox::FAMILY,
    gpt_oss::FAMILY,
    granite::FAMILY,
    granitemoe::FAMILY,
    hunyuan_v1_dense::FAMILY,
    llama::FAMILY,
    minimax_m2::FAMILY,
    mistral::FAMILY,
    mixtral::FAMILY,
    olmo2::FAMILY,
    olmo3::FAMILY,
    olmoe::FAMILY,
    phi3::FAMILY,
    qwen2::FAMILY,
    qwen2_moe::FAMILY,
    qwen3::FAMILY,
    qwen3_5_moe_text::FAMILY,
    qwen3_5_text::FAMILY,
    qwen3_moe::FAMILY,
    qwen3_next::FAMILY,
    seed_oss::FAMILY,
    smollm3::FAMILY,
    starcoder2::FAMILY,
];

/// Families of 2026 that are refused, by `model_type` without `_text`, and what is missing here.
pub const REFUSED: &[(&str, &str)] = &[
    ("apertus", "the activation of its MLP has trained coefficients (xIELU), which no operation here has"),
    (
        "gemma3n",
        "its layers have embeddings of their own and several streams of hidden states (AltUp), and some use the keys and values \
         of others",
    ),
    ("gemma4", "its layers have embeddings of their own, and some use the keys and values of others"),
    (
        "llama4",
        "its attention is cut into chunks of positions, with a temperature that grows with them, and its router scales what goes \
         into experts",
    ),
    ("nemotron_h", "most of its layers are state space models (Mamba 2), which no operation here computes"),
];

/// Returns the family of a `model_type`.
///
/// # Errors
/// [`ConfigError::Operations`] if its operations are missing, [`ConfigError::Family`] if there is none.
pub(in crate::hf) fn family_of(model_type: &Value) -> Result<&'static Family, ConfigError> {
    // Kimi K2 is published with DeepSeek's class under a name of its own.
    let name = if model_type == "kimi_k2" {
        deepseek_v3::FAMILY.model_type
    } else {
        model_type.as_str().unwrap_or_default()
    };
    if let Some((_, why)) = REFUSED.iter().find(|(refused, _)| *refused == name.trim_end_matches("_text")) {
        return Err(ConfigError::Operations { model_type: model_type.to_string(), why });
    }
    let found = FAMILIES.iter().find(|family| name == family.model_type);
    found.ok_or_else(|| ConfigError::Family {
        model_type: model_type.to_string(),
        nearest: nearest(model_type.as_str().unwrap_or_default()),
        supported: supported(),
    })
}

/// Returns the family of the text part of a model of text and images, if it has one.
pub(in crate::hf) fn text_family_of(model_type: &str) -> Option<&'static Family> {
    match model_type {
        "qwen3_5" => Some(&qwen3_5_text::FAMILY),
        "qwen3_5_moe" => Some(&qwen3_5_moe_text::FAMILY),
        _ => None,
    }
}

/// Returns the names of all families, formatted as a list in a sentence.
fn supported() -> String {
    let names: Vec<String> = FAMILIES.iter().map(|family| format!("\"{}\"", family.model_type)).collect();
    let (last, others) = names.split_last().expect("there are families");
    format!("{} and {last}", others.join(", "))
}

/// Returns the family with the most similar name.
fn nearest(model_type: &str) -> &'static str {
    // The text part of a multimodal model has a suffix: "gemma3" and "gemma3_text".
    let is_part =
        |family: &Family| !model_type.is_empty() && family.model_type == format!("{model_type}_text");
    let similarity = |family: &&Family| {
        if is_part(family) { 1.0 } else { strsim::jaro_winkler(model_type, family.model_type) }
    };
    let nearest = FAMILIES.iter().max_by(|one, other| similarity(one).total_cmp(&similarity(other)));
    nearest.expect("there are families").model_type
}

/// Whether a tensor of a checkpoint is a constant in some family, such as a causal mask or a rotary table.
pub fn is_constant(name: &str) -> bool {
    FAMILIES.iter().flat_map(|family| family.constants).any(|end| name.ends_with(end))
}

/// Returns the name of a tensor in files of a model without its head; `None` if it belongs to the head.
pub fn base_name(name: &str) -> Option<&str> {
    FAMILIES.iter().find_map(|family| name.strip_prefix(family.base_prefix))
}

/// Returns the name that transformers 5 gives a tensor in memory, and so in checkpoints that are not written by
/// `save_pretrained`, if that differs from its name in files: the head of GPT-NeoX.
pub fn name_in_memory(name: &str) -> Option<&'static str> {
    (name == "embed_out.weight").then_some("lm_head.weight")
}

#[cfg(test)]
mod tests;
