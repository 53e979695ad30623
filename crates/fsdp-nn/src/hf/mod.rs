//! Hugging Face models: `config.json` in, a described model out, and the names of checkpoint tensors.
//!
//! Every key that changes the mathematics is either supported or rejected by name; all others are ignored,
//! and the file is kept as it is, so that an export carries them on. Spellings of transformers 4 and 5 are
//! understood. Names, shapes and orientations need no map: a model's description *is* that of its
//! checkpoint.

mod config;
mod error;
mod gpt2;
mod keys;
mod limits;
mod llama;
mod model;
mod names;

pub use config::{HfConfig, HfFamily};
pub use error::ConfigError;
pub use model::HfModel;
pub use names::TensorRole;
