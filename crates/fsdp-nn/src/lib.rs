//! Compute: operations, graphs of them, layers, models, update rules and the host backend.
//!
//! This crate is a part of [`fsdp`](https://docs.rs/fsdp), without a promise of stability: any version may change it.
//!
//! | module | contents |
//! |---|---|
//! | [`op`], [`backend`] | operations as values, each with forward and backward; the trait that executes them |
//! | [`graph`] | a block as a graph of calls, and the lists of calls that run it |
//! | [`layer`], [`model`] | layers, the model trait ([`model::Architecture`]), decoders such as Llama, GPT-2, an MLP |
//! | [`hf`] | Hugging Face `config.json` and tensor names |
//! | [`update`] | update rules over shards: AdamW (also 8-bit and schedule-free), SGD, Lion, Adafactor, Muon |
//! | [`quantized`] | matrices of 4-bit numbers |
//! | [`random`] | counter-based random numbers for initial values and dropout |
//! | [`sampling`] | choice of the next token from logits |
//! | [`host`] | memory and kernels on the CPU |
//! | [`conformance`] | the test suite that every backend must pass |
//! | [`cuts`] | chunks of samples and of experts |
//! | [`accounting`], [`lengths`] | memory accounting and argument checks shared by all backends |
//! | [`footprint`], [`listing`] | allocations and operations of a model, determined without running it |

pub mod accounting;
pub mod backend;
mod chunks;
#[expect(clippy::unwrap_used, reason = "checks: what fails is their report")]
pub mod conformance;
pub mod cuts;
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
pub mod quantized;
pub mod random;
pub mod sampling;
pub mod update;

pub use backend::Backend;
pub use error::{ModelError, PlanFault};
pub use host::{HostBuffer, HostMemory, HostOptions, HostPool};
pub use init::Init;

#[cfg(test)]
mod tests;
