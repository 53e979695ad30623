//! The `[train.loss_scale]` table: the factor that keeps small gradients of an f16 run from underflowing.

use super::error::ConfigError;
use super::kind::{BOOL, POSITIVE_COUNT, POWER_OF_TWO};
use super::reader::Reader;
use super::table::table;
use super::writer;

/// Initial scale of `torch.amp.GradScaler`.
const INIT: f64 = 65536.0;

/// Growth interval of `torch.amp.GradScaler`, in steps.
const GROWTH_INTERVAL: u64 = 2000;

table! {
    /// The `[train.loss_scale]` table.
    pub struct LossScaleConfig {
        /// Initial scale.
        init: f64 = or(POWER_OF_TWO, INIT),
        /// Number of steps without an overflow after which the scale doubles.
        growth_interval: u64 = or(POSITIVE_COUNT, GROWTH_INTERVAL),
        /// Whether an overflow skips the step and halves the scale. If not, the scale is fixed and an overflow ends the run.
        dynamic: bool = or(BOOL, true),
    }
}

impl Default for LossScaleConfig {
    fn default() -> Self {
        Self { init: INIT, growth_interval: GROWTH_INTERVAL, dynamic: true }
    }
}
