//! The `[checkpoint]` table: when training states are saved, and how many are kept.

use super::error::ConfigError;
use super::kind::{BOOL, COUNT, SIZE_OR_ZERO};
use super::reader::Reader;
use super::table::table;
use super::written;

table! {
    /// The `[checkpoint]` table.
    pub struct CheckpointConfig {
        /// Save after every so many steps, and after the last; 0 means only when the run is stopped.
        every: u64 = or(COUNT, 0),
        /// Keep so many checkpoints, the newest ones; 0 means all.
        keep_last: usize = or(SIZE_OR_ZERO, 2),
        /// Keep besides these so many, whose evaluations gave the lowest losses; saved when an evaluation finds one.
        keep_best: usize = or(SIZE_OR_ZERO, 0),
        /// Write behind the steps that follow, from a copy of the state, rather than between two steps.
        is_async as "async": bool = or(BOOL, true),
    }
}

impl CheckpointConfig {
    /// Whether a checkpoint is due after so many of `steps` steps.
    pub fn is_due(&self, done: u64, steps: u64) -> bool {
        self.every > 0 && (done.is_multiple_of(self.every) || done == steps)
    }
}
