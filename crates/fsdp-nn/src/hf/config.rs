//! Parses a complete `config.json`.

use std::sync::Arc;

use fsdp_core::{DType, Error};
use serde_json::{Map, Value, json};

use super::error::ConfigError;
use super::families::{Family, family_of, text_family_of};
use super::keys::Keys;
use super::sizes::{Sizes, Small, Summary};
use crate::model::Architecture;

/// A model of any family.
pub type HfModel = Arc<dyn Architecture>;

/// A parsed `config.json`, with the original keys.
#[derive(Clone, Debug)]
pub struct HfConfig {
    family: &'static Family,
    sizes: Arc<dyn Sizes>,
    original: Map<String, Value>,
}

impl HfConfig {
    /// Parses the text of a `config.json`.
    ///
    /// # Errors
    /// [`ConfigError`], which names the key.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let original = text_part(object(text)?);
        let (family, sizes) = read(Keys::new(&original, None))?;
        Ok(Self { family, sizes, original })
    }

    /// Returns the keys that the parser of a file's family reads, each with the accepted values if others are
    /// refused.
    #[cfg(test)]
    pub(crate) fn read_keys(
        text: &str,
    ) -> Result<std::collections::BTreeMap<String, Option<String>>, ConfigError> {
        let (original, read_keys) = (object(text)?, super::keys::ReadKeys::default());
        read(Keys::new(&original, Some(&read_keys)))?;
        Ok(read_keys.into_inner())
    }

    /// Builds the model.
    ///
    /// # Errors
    /// [`Error::Model`] if the description is inconsistent.
    pub fn build(&self) -> Result<HfModel, Error> {
        self.sizes.build()
    }

    /// Returns the model's family.
    pub fn family(&self) -> &'static Family {
        self.family
    }

    /// Returns the model's sizes.
    pub fn summary(&self) -> Summary {
        self.sizes.summary()
    }

    /// Returns a small model of the same kind ([`Sizes::shrink`]).
    pub fn shrink(&self, to: Small) -> Self {
        Self { sizes: self.sizes.shrink(to), ..self.clone() }
    }

    /// Returns the same model without a row for padding ([`Sizes::without_padding_row`]).
    pub fn without_padding_row(&self) -> Self {
        Self { sizes: self.sizes.without_padding_row(), ..self.clone() }
    }

    /// Returns the text of a `config.json` for exported weights of `dtype`: all keys of the original, with the dtype
    /// replaced, and the class with that of a model with a head.
    pub fn export(&self, dtype: DType) -> String {
        let name = match dtype {
            DType::F64 => "float64",
            DType::Bf16 => "bfloat16",
            DType::F16 => "float16",
            _ => "float32",
        };
        let mut keys = self.original.clone();
        // Transformers 4 wrote `torch_dtype`, which transformers 5 still reads.
        let key = if keys.contains_key("torch_dtype") { "torch_dtype" } else { "dtype" };
        keys.insert(key.into(), name.into());
        // Exported weights are floats.
        keys.remove("quantization_config");
        if keys.get("architectures").is_some_and(|names| !lists(names, self.family.class)) {
            keys.insert("architectures".into(), json!([self.family.class]));
        }
        format!("{:#}\n", Value::Object(keys))
    }
}

/// The family whose published files have experts in MXFP4, which are read as floats.
const MXFP4_FAMILY: &str = "gpt_oss";

fn object(text: &str) -> Result<Map<String, Value>, ConfigError> {
    let json = |what: String| ConfigError::Json { what };
    match serde_json::from_str(text).map_err(|error| json(error.to_string()))? {
        Value::Object(object) => Ok(object),
        _ => Err(json("its top-level value has another type".into())),
    }
}

/// The keys of the text model in a model of text and images (Qwen 3.5), as a file of their own; other files as they are.
fn text_part(mut keys: Map<String, Value>) -> Map<String, Value> {
    let whole = keys.get("model_type").and_then(Value::as_str).unwrap_or_default();
    let (Some(family), Some(Value::Object(text))) = (text_family_of(whole), keys.get("text_config").cloned())
    else {
        return keys;
    };
    let mut text = Map::from_iter(text.into_iter().filter(|(_, value)| !value.is_null()));
    text.insert("model_type".into(), family.model_type.into());
    text.insert("architectures".into(), json!([family.class]));
    for key in ["tie_word_embeddings", "quantization_config", "dtype", "torch_dtype"] {
        if let Some(value) = keys.remove(key).filter(|_| !text.contains_key(key)) {
            text.insert(key.into(), value);
        }
    }
    text
}

/// Determines the family of a file, and parses its sizes.
fn read(keys: Keys<'_>) -> Result<(&'static Family, Arc<dyn Sizes>), ConfigError> {
    let missing = || ConfigError::Missing { key: keys.path("model_type") };
    let family = family_of(keys.get("model_type").ok_or_else(missing)?)?;
    let Family { class, base_class, .. } = family;
    keys.only("architectures", &format!("a list with `{class}` or `{base_class}`"), |names| {
        lists(names, class) || lists(names, base_class)
    })?;
    let published = (family.model_type == MXFP4_FAMILY).then_some(" or \"mxfp4\"");
    keys.only(
        "quantization_config",
        &format!(
            "null, or an object with `quant_method` \"bitsandbytes\" and `load_in_4bit`{}",
            published.unwrap_or_default()
        ),
        |settings| match settings.get("quant_method").and_then(Value::as_str) {
            Some("mxfp4") => published.is_some(),
            Some("bitsandbytes") => settings.get("load_in_4bit") == Some(&Value::Bool(true)),
            _ => false,
        },
    )?;
    keys.only_false("is_encoder_decoder")?;
    keys.only_false("add_cross_attention")?;
    keys.only("pruned_heads", "no pruned heads", |heads| heads.as_object().is_some_and(Map::is_empty))?;
    Ok((family, (family.parse)(keys)?))
}

/// Whether a list of strings contains `name`.
fn lists(names: &Value, name: &str) -> bool {
    names.as_array().is_some_and(|names| names.iter().any(|each| each == name))
}
