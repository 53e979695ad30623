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
        /// Whether the embedding has a row that inputs give no gradient: that of the padding token.
        padding_row: PaddingRow = named(PaddingRow::Config),
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

/// The row of the embedding that inputs give no gradient, and that is zero in random weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PaddingRow {
    /// That of `pad_token_id` in `config.json`, as in transformers.
    Config,
    /// All rows are trained alike.
    None,
}

named! {
    Init { "random": Random, "pretrained": Pretrained }
    PaddingRow { "config": Config, "none": None }
}
