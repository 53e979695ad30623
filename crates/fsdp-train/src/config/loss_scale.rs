//! The `[train.loss_scale]` table: what the gradients of a run in f16 are multiplied with, so that small ones are not lost.

use super::error::ConfigError;
use super::kind::{BOOL, POSITIVE_COUNT, POWER_OF_TWO};
use super::reader::Reader;
use super::table::table;
use super::written;

/// As `torch.amp.GradScaler` begins.
const INIT: f64 = 65536.0;

/// As there.
const GROWTH_INTERVAL: u64 = 2000;

table! {
    /// The `[train.loss_scale]` table.
    pub struct LossScaleConfig {
        /// The scale of the first step.
        init: f64 = or(POWER_OF_TWO, INIT),
        /// So many steps without an overflow double it.
        growth_interval: u64 = or(POSITIVE_COUNT, GROWTH_INTERVAL),
        /// Whether an overflow skips the step and halves the scale; or else it stays, and an overflow ends the run.
        dynamic: bool = or(BOOL, true),
    }
}

impl Default for LossScaleConfig {
    fn default() -> Self {
        Self { init: INIT, growth_interval: GROWTH_INTERVAL, dynamic: true }
    }
}
