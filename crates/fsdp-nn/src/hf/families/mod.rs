//! The families of models, in one table. A family is one file beside this one, and one line here.

mod decoder;
mod gemma;
mod gemma2;
mod gemma3_text;
mod gpt2;
mod gpt_neox;
mod llama;
mod mistral;
mod mixtral;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_moe;
mod rope;
mod smollm3;
mod starcoder2;

use std::fmt;
use std::sync::Arc;

use serde_json::Value;

use crate::hf::error::ConfigError;
use crate::hf::keys::Keys;
use crate::hf::sizes::Sizes;

/// The families that are supported, by name.
pub const FAMILIES: &[Family] = &[
    gemma2::FAMILY,
    gemma3_text::FAMILY,
    gpt2::FAMILY,
    gpt_neox::FAMILY,
    llama::FAMILY,
    mistral::FAMILY,
    mixtral::FAMILY,
    olmo2::FAMILY,
    phi3::FAMILY,
    qwen2::FAMILY,
    qwen3::FAMILY,
    qwen3_moe::FAMILY,
    smollm3::FAMILY,
    starcoder2::FAMILY,
];

/// A family of models: what its `config.json` says, and what files hold beside its parameters.
pub struct Family {
    /// `model_type` of its `config.json`.
    pub model_type: &'static str,
    /// The class of transformers that is meant, which `architectures` lists.
    pub class: &'static str,
    /// What is special about it, in a sentence.
    pub about: &'static str,
    /// What names of tensors begin with, where published files leave it out.
    pub optional_prefix: Option<&'static str>,
    /// How the names of tensors end that older versions saved although they are constants.
    pub constants: &'static [&'static str],
    /// Reads the keys, and refuses those whose values it does not know.
    pub(in crate::hf) parse: fn(Keys<'_>) -> Result<Arc<dyn Sizes>, ConfigError>,
}

impl Family {
    /// The family of a `model_type`.
    ///
    /// # Errors
    /// [`ConfigError::Family`]: there is none.
    pub(in crate::hf) fn of(model_type: &Value) -> Result<&'static Family, ConfigError> {
        let found = FAMILIES.iter().find(|family| model_type == family.model_type);
        found.ok_or_else(|| ConfigError::Family {
            model_type: model_type.to_string(),
            nearest: nearest(model_type.as_str().unwrap_or_default()),
        })
    }
}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.model_type)
    }
}

/// The names of all families, as a sentence lists them.
pub(in crate::hf) fn supported() -> String {
    let names: Vec<String> = FAMILIES.iter().map(|family| format!("\"{}\"", family.model_type)).collect();
    let (last, others) = names.split_last().expect("there are families");
    format!("{} and {last}", others.join(", "))
}

/// The family whose name is most like one that was meant.
fn nearest(model_type: &str) -> &'static str {
    // A model of text and images is named like its part that reads text: "gemma3" and "gemma3_text".
    let is_part =
        |family: &Family| !model_type.is_empty() && family.model_type == format!("{model_type}_text");
    let likeness = |family: &&Family| {
        if is_part(family) { 1.0 } else { strsim::jaro_winkler(model_type, family.model_type) }
    };
    let nearest = FAMILIES.iter().max_by(|one, other| likeness(one).total_cmp(&likeness(other)));
    nearest.expect("there are families").model_type
}

/// Whether a tensor of a checkpoint is a constant in some family: a causal mask, a rotary table.
pub fn is_constant(name: &str) -> bool {
    FAMILIES.iter().flat_map(|family| family.constants).any(|end| name.ends_with(end))
}

/// The other name that published files may have for a tensor.
pub fn published_name(name: &str) -> Option<&str> {
    FAMILIES.iter().find_map(|family| name.strip_prefix(family.optional_prefix?))
}

#[cfg(test)]
mod tests;
