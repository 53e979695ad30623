//! The run file: from TOML text and `--set` overrides to a [`Resolved`] configuration.
//!
//! This crate is a part of [`fsdp`](https://docs.rs/fsdp), without a promise of stability: any version may change it.
//!
//! Reading goes in one direction: first the text, merged over the files that it extends, then the overrides, then each
//! table (unknown keys first, then types and ranges), then the rules between keys. The result has every default filled
//! in and can be serialized; reading that text gives an equal value.
//!
//! The structs mirror the file, not the trainer: they know neither the model nor the world. Checks that need the model
//! (whether a class exists, whether the heads divide) are made where the model is built.

mod adapter;
mod checkpoint;
mod data;
mod describe;
mod early_stop;
mod error;
mod eval;
mod extends;
mod fsdp;
pub mod fsdp_json;
mod group;
pub mod input_file;
mod kind;
mod load;
mod loss_scale;
mod model;
mod named;
mod optimizer;
mod patterns;
mod reader;
mod resolved;
mod run;
mod schedule;
mod schema;
mod table;
mod train;
mod validate;
mod warning;
mod writer;

pub use adapter::{AdapterConfig, AdapterKind, Quantize, Targets};
pub use checkpoint::CheckpointConfig;
pub use data::{DataConfig, EndToken, Format, LossOn, Malformed, Packing, SourceConfig, TokenRef};
pub use early_stop::{EarlyStopConfig, WatchedLoss};
pub use error::ConfigError;
pub use eval::EvalSet;
pub use fsdp::{FsdpConfig, MeshConfig};
pub use group::GroupConfig;
pub use load::Loaded;
pub use loss_scale::LossScaleConfig;
pub use model::{Init, ModelConfig, PaddingRow};
pub use optimizer::{AdafactorConfig, AdamwConfig, LionConfig, MuonConfig, OptimizerConfig, SgdConfig};
pub use patterns::FqnPatterns;
pub use reader::nearest;
pub use resolved::{Ranks, Resolved, World};
pub use run::{
    Device, ExportWeights, KernelChoice, LINEAR_ATTENTION, MIXTURES, MetricsSink, RunConfig, Transport,
    XlaConfig, XlaReduction,
};
pub use schedule::{DecayCurve, LrScheduleConfig, LrShape, MinLr, Warmup};
pub use schema::schema;
pub use train::TrainConfig;
pub use warning::Warning;

#[cfg(test)]
mod tests;
