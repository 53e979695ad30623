//! A `config.json` as a whole.

use fsdp_core::{DType, Error};
use serde_json::{Map, Value};

use super::error::ConfigError;
use super::keys::Keys;
use super::model::HfModel;
use super::{gpt2, llama};
use crate::model::{Gpt2, Gpt2Config, Llama, LlamaConfig};

/// The sizes of a model, by family.
#[derive(Clone, Debug, PartialEq)]
pub enum HfFamily {
    /// `model_type` `llama`.
    Llama(LlamaConfig),
    /// `model_type` `gpt2`.
    Gpt2(Gpt2Config),
}

/// A parsed `config.json`, and the file as it was.
#[derive(Clone, Debug, PartialEq)]
pub struct HfConfig {
    /// The sizes.
    pub family: HfFamily,
    original: Map<String, Value>,
}

impl HfConfig {
    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    /// [`ConfigError`] that names the key.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let json = |what: String| ConfigError::Json { what };
        let value: Value = serde_json::from_str(text).map_err(|error| json(error.to_string()))?;
        let Value::Object(original) = value else {
            return Err(json("its outermost value is something else".into()));
        };
        let keys = Keys(&original);
        let model_type = keys.get("model_type").ok_or(ConfigError::Missing { key: "model_type" })?;
        keys.only_null("quantization_config")?;
        keys.only_false("is_encoder_decoder")?;
        keys.only("pruned_heads", "no pruned heads", |heads| heads.as_object().is_some_and(Map::is_empty))?;
        keys.only("layer_types", "\"full_attention\" in every layer", is_full_attention)?;
        let family = match model_type.as_str() {
            Some("llama") => {
                keys.only("architectures", "LlamaForCausalLM", |names| lists(names, "LlamaForCausalLM"))?;
                HfFamily::Llama(llama::parse(keys)?)
            }
            Some("gpt2") => {
                keys.only("architectures", "GPT2LMHeadModel", |names| lists(names, "GPT2LMHeadModel"))?;
                HfFamily::Gpt2(gpt2::parse(keys)?)
            }
            _ => {
                let (key, value) = ("model_type", model_type.to_string());
                return Err(ConfigError::Unsupported { key, value, supported: "\"llama\" and \"gpt2\"" });
            }
        };
        Ok(Self { family, original })
    }

    /// Describes the model.
    ///
    /// # Errors
    /// [`Error::Model`] when the description contradicts itself.
    pub fn build(&self) -> Result<HfModel, Error> {
        Ok(match &self.family {
            HfFamily::Llama(config) => HfModel::Llama(Llama::new(config)?),
            HfFamily::Gpt2(config) => HfModel::Gpt2(Gpt2::new(config)?),
        })
    }

    /// The sequence length that the model was made for (a hard limit for GPT-2).
    pub fn positions(&self) -> usize {
        match &self.family {
            HfFamily::Llama(config) => config.max_position_embeddings,
            HfFamily::Gpt2(config) => config.n_positions,
        }
    }

    /// The text of a `config.json` to put beside exported weights of `dtype`: all keys of the original, the
    /// dtype replaced.
    pub fn export(&self, dtype: DType) -> String {
        let name = match dtype {
            DType::F64 => "float64",
            DType::Bf16 => "bfloat16",
            _ => "float32",
        };
        let mut keys = self.original.clone();
        // Transformers 4 wrote `torch_dtype`, and transformers 5 still reads it.
        let key = if keys.contains_key("torch_dtype") { "torch_dtype" } else { "dtype" };
        keys.insert(key.into(), name.into());
        format!("{:#}\n", Value::Object(keys))
    }
}

/// Whether a list of strings has a member.
fn lists(names: &Value, name: &str) -> bool {
    names.as_array().is_some_and(|names| names.iter().any(|each| each == name))
}

fn is_full_attention(types: &Value) -> bool {
    types.as_array().is_some_and(|types| types.iter().all(|each| each == "full_attention"))
}
