//! Hugging Face models: parses a `config.json` to a described model, and knows the names of checkpoint tensors.
//!
//! Every key that changes the mathematics is either supported or rejected by name. All others are ignored, and the
//! file is kept unchanged, so that an export preserves them. Spellings of transformers 4 and 5 are supported. Names,
//! shapes and orientations need no mapping: a model's description *is* that of its checkpoint.

mod config;
mod error;
mod families;
mod keys;
mod limits;
mod sizes;

pub use config::{HfConfig, HfModel};
pub use error::ConfigError;
pub use families::{FAMILIES, Family, REFUSED, base_name, is_constant, name_in_memory};
pub use sizes::{Sizes, Small, Summary};
