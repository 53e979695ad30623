//! The `[model]` table: which model, and where its first weights come from.

use serde::{Deserialize, Serialize};
use toml::Table;

use super::error::ConfigError;
use super::kind::{COUNT, Kind, TEXT, one_of};
use super::reader::{Origin, Reader};

const INIT: Kind<Init> = one_of("\"random\" or \"pretrained\"");

/// The `[model]` table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelConfig {
    /// A Hugging Face directory with `config.json`.
    pub path: String,
    /// Where the weights come from.
    pub init: Init,
    /// Seed of random weights and dropout.
    pub seed: u64,
}

/// Where the weights come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Init {
    /// Counter-based random numbers.
    Random,
    /// `model.safetensors`, or shards with their index.
    Pretrained,
}

impl ModelConfig {
    pub(super) fn read(origin: &Origin, table: Table) -> Result<ModelConfig, ConfigError> {
        let reader = Reader::open(origin, "model", table, &["path", "init", "seed"])?;
        Ok(ModelConfig {
            path: reader.required("path", TEXT)?,
            init: reader.or("init", INIT, Init::Random)?,
            seed: reader.or("seed", COUNT, 0)?,
        })
    }
}
