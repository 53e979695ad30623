//! The `[train]` table: how long, in what batches, and with which update.

use serde::{Serialize, Serializer};
use toml::{Table, Value};

use super::error::ConfigError;
use super::kind::{Kind, POSITIVE, POSITIVE_COUNT, SIZE};
use super::optimizer::OptimizerConfig;
use super::reader::{Origin, Reader};
use super::schedule::LrScheduleConfig;

const CLIP: Kind<Option<f64>> = Kind { allowed: "a finite number above 0, or \"none\"", read: clip };
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
    #[serde(serialize_with = "write_clip")]
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
            micro_batch_size: reader.required("micro_batch_size", SIZE)?,
            global_batch_size: reader.required("global_batch_size", SIZE)?,
            grad_clip: reader.or("grad_clip", CLIP, None)?,
            optimizer: OptimizerConfig::read(origin, &reader)?,
            lr_schedule: LrScheduleConfig::read(origin, &reader)?,
        })
    }

    /// V: the micro-batches of one step, whatever the world.
    pub fn micro_batches_per_step(&self) -> usize {
        self.global_batch_size / self.micro_batch_size
    }
}

#[expect(clippy::option_option, reason = "the outer says whether it was readable, the inner whether to clip")]
fn clip(value: &Value) -> Option<Option<f64>> {
    if value.as_str() == Some("none") { Some(None) } else { (POSITIVE.read)(value).map(Some) }
}

fn write_clip<S: Serializer>(clip: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
    match clip {
        Some(norm) => serializer.serialize_f64(*norm),
        None => serializer.serialize_str("none"),
    }
}
