//! Compute: operations, graphs of them, layers, models, update rules and the host backend.
//!
//! | module | what |
//! |---|---|
//! | [`op`], [`backend`] | operations as values, each forward and backward; what runs them |
//! | [`graph`] | a block as a graph of calls, and the lists of calls that run it |
//! | [`layer`], [`model`] | layers, the trait of a model ([`model::Architecture`]), decoders such as Llama, GPT-2, an MLP |
//! | [`hf`] | Hugging Face `config.json` and names of tensors |
//! | [`update`] | AdamW, SGD and Adafactor over shards |
//! | [`random`] | numbers from keys and counters, for initial values and dropout |
//! | [`sampling`] | which token follows, by its logits |
//! | [`host`] | memory and kernels on the CPU |
//! | [`conformance`] | the suite that every backend must pass |
//! | [`accounting`], [`lengths`] | what every memory counts, and what every backend checks |
//! | [`footprint`], [`listing`] | what a model allocates and runs, found without running it |

pub mod accounting;
pub mod backend;
mod chunks;
#[expect(clippy::unwrap_used, reason = "checks: what fails is their report")]
pub mod conformance;
mod error;
pub mod footprint;
pub mod graph;
pub mod hf;
pub mod host;
mod init;
pub mod layer;
pub mod lengths;
pub mod listing;
pub mod model;
pub mod op;
pub mod random;
pub mod sampling;
pub mod update;

pub use backend::Backend;
pub use error::ModelError;
pub use host::{HostBuffer, HostMemory, HostOptions, HostPool};
pub use init::Init;

#[cfg(test)]
mod tests;
