//! The `[train]` table: how long, in what batches, and with which update.

use super::error::ConfigError;
use super::kind::{MICRO_BATCH_SIDE, POSITIVE, POSITIVE_COUNT, SIZE};
use super::optimizer::OptimizerConfig;
use super::reader::Reader;
use super::schedule::LrScheduleConfig;
use super::table::table;
use super::written;

table! {
    /// The `[train]` table.
    pub struct TrainConfig {
        /// Optimizer steps.
        steps: u64 = required(POSITIVE_COUNT),
        /// Samples per forward and backward.
        micro_batch_size: usize = required(MICRO_BATCH_SIDE),
        /// Samples per optimizer step.
        global_batch_size: usize = required(SIZE),
        /// The largest global L2 norm of the gradient, if it is clipped.
        grad_clip: Option<f64> = or_none(POSITIVE),
        /// The update rule.
        optimizer: OptimizerConfig = table(OptimizerConfig::read),
        /// How the learning rate goes over the steps.
        lr_schedule: LrScheduleConfig = table(LrScheduleConfig::read),
    }
}

impl TrainConfig {
    /// V: the micro-batches of one step, whatever the world.
    pub fn micro_batches_per_step(&self) -> usize {
        self.global_batch_size / self.micro_batch_size
    }
}
