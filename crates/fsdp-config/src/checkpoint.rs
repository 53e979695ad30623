//! The `[checkpoint]` table: when training states are saved, and how many are kept.

use super::error::ConfigError;
use super::kind::{BOOL, COUNT, SIZE_OR_ZERO};
use super::reader::Reader;
use super::table::table;
use super::writer;

table! {
    /// The `[checkpoint]` table.
    pub struct CheckpointConfig {
        /// Number of steps between saves; the last step is saved too. 0 saves only when the run is stopped.
        every: u64 = or(COUNT, 0),
        /// Number of newest checkpoints to keep; 0 keeps all.
        keep_last: usize = or(SIZE_OR_ZERO, 2),
        /// Number of checkpoints with the lowest evaluation losses to keep as well; saved when an evaluation finds one.
        keep_best: usize = or(SIZE_OR_ZERO, 0),
        /// Whether to write from a copy of the state while the next steps run, rather than between two steps.
        is_async as "async": bool = or(BOOL, true),
    }
}

impl CheckpointConfig {
    /// Whether a checkpoint is due after `done` of `steps` steps.
    pub fn is_due(&self, done: u64, steps: u64) -> bool {
        self.every > 0 && (done.is_multiple_of(self.every) || done == steps)
    }
}
