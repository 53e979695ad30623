//! The `[train]` table: how long, in what batches, and with which update.

use serde::Serialize;
use toml::Table;

use super::error::ConfigError;
use super::kind::{MICRO_BATCH_SIDE, POSITIVE, POSITIVE_COUNT, SIZE, write_or_none};
use super::optimizer::OptimizerConfig;
use super::reader::{Origin, Reader};
use super::schedule::LrScheduleConfig;

const KEYS: &[&str] =
    &["steps", "micro_batch_size", "global_batch_size", "grad_clip", "optimizer", "lr_schedule"];

/// The `[train]` table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrainConfig {
    /// Optimizer steps.
    pub steps: u64,
    /// Samples per forward and backward.
    pub micro_batch_size: usize,
    /// Samples per optimizer step.
    pub global_batch_size: usize,
    /// The largest global L2 norm of the gradient, if it is clipped; written as `"none"` otherwise.
    #[serde(serialize_with = "write_or_none")]
    pub grad_clip: Option<f64>,
    /// The update rule.
    pub optimizer: OptimizerConfig,
    /// How the learning rate goes over the steps.
    pub lr_schedule: LrScheduleConfig,
}

impl TrainConfig {
    pub(super) fn read(origin: &Origin, table: Table) -> Result<TrainConfig, ConfigError> {
        let reader = Reader::open(origin, "train", table, KEYS)?;
        Ok(TrainConfig {
            steps: reader.required("steps", POSITIVE_COUNT)?,
            micro_batch_size: reader.required("micro_batch_size", MICRO_BATCH_SIDE)?,
            global_batch_size: reader.required("global_batch_size", SIZE)?,
            grad_clip: reader.or_none("grad_clip", POSITIVE)?,
            optimizer: OptimizerConfig::read(origin, &reader)?,
            lr_schedule: LrScheduleConfig::read(origin, &reader)?,
        })
    }

    /// V: the micro-batches of one step, whatever the world.
    pub fn micro_batches_per_step(&self) -> usize {
        self.global_batch_size / self.micro_batch_size
    }
}
