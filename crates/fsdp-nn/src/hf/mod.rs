//! Hugging Face models: `config.json` in, a described model out, and the names of checkpoint tensors.
//!
//! Every key that changes the mathematics is either supported or rejected by name; all others are ignored,
//! and the file is kept as it is, so that an export carries them on. Spellings of transformers 4 and 5 are
//! understood. Names, shapes and orientations need no map: a model's description *is* that of its
//! checkpoint.

mod config;
mod error;
mod families;
mod keys;
mod limits;
mod sizes;

pub use config::{HfConfig, HfModel};
pub use error::ConfigError;
pub use families::{FAMILIES, Family, is_constant, published_name};
pub use sizes::{Sizes, Small, Summary};
