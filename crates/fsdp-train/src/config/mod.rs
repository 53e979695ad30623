//! The run file: from TOML text and `--set` overrides to a [`Resolved`] configuration.
//!
//! Reading has one direction: text, on top of that of the file that it extends, then overrides, then one table after the other (unknown keys first,
//! then types and ranges), then the rules between keys. What comes out has every default written out and
//! can be serialized again; reading that text gives an equal value.
//!
//! The structs here are what the file says, not what the trainer works with: they know no model and no
//! world. Checks that need the model (does the class exist, do the heads divide) are made by whoever builds
//! it.

mod adapter;
mod checkpoint;
mod early_stop;
mod error;
mod eval;
mod extends;
mod fsdp;
pub mod fsdp_json;
mod group;
mod input;
mod kind;
mod load;
mod loss_scale;
mod model;
mod named;
mod optimizer;
mod patterns;
mod reader;
mod run;
mod schedule;
mod schema;
mod table;
mod train;
mod validate;
mod warning;
mod written;

pub use adapter::{AdapterConfig, AdapterKind, Targets};
pub use checkpoint::CheckpointConfig;
pub use early_stop::{EarlyStopConfig, WatchedLoss};
pub use error::ConfigError;
pub use eval::EvalSet;
pub use fsdp::{FsdpConfig, MeshConfig};
pub use group::GroupConfig;
pub use input::{DataConfig, EndToken, Format, LossOn, Malformed, Packing, SourceConfig, TokenRef};
pub use load::{Loaded, Resolved};
pub use loss_scale::LossScaleConfig;
pub use model::{Init, ModelConfig};
pub use optimizer::{AdafactorConfig, AdamwConfig, LionConfig, MuonConfig, OptimizerConfig, SgdConfig};
pub use patterns::FqnPatterns;
pub(crate) use reader::nearest;
pub use run::{
    Device, ExportWeights, KernelChoice, MetricsSink, RunConfig, Transport, XlaConfig, XlaReduction,
};
pub use schedule::{DecayCurve, LrScheduleConfig, LrShape, MinLr, Warmup};
pub use schema::schema;
pub use train::TrainConfig;
pub use warning::Warning;

#[cfg(test)]
mod tests;
