//! The `[model]` table: the model and the source of its initial weights.

use super::error::ConfigError;
use super::kind::{COUNT, TEXT};
use super::named::named;
use super::reader::Reader;
use super::table::table;
use super::writer;

table! {
    /// The `[model]` table.
    pub struct ModelConfig {
        /// A Hugging Face directory with `config.json`.
        path: String = required(TEXT),
        /// Source of the initial weights.
        init: Init = named(Init::Random),
        /// Seed of random weights and dropout.
        seed: u64 = or(COUNT, 0),
    }
}

/// Source of the initial weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Init {
    /// Counter-based random numbers.
    Random,
    /// `model.safetensors`, or shards with their index.
    Pretrained,
}

named! {
    Init { "random": Random, "pretrained": Pretrained }
}
