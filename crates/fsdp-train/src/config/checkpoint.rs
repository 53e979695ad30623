//! The `[checkpoint]` table: when training states are saved, and how many are kept.

use serde::Serialize;
use toml::Table;

use super::error::ConfigError;
use super::kind::{BOOL, COUNT, SIZE_OR_ZERO};
use super::reader::{Origin, Reader};

const KEYS: &[&str] = &["every", "keep_last", "async"];

/// The `[checkpoint]` table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CheckpointConfig {
    /// Save after every so many steps, and after the last; 0 means only when the run is stopped.
    pub every: u64,
    /// Keep so many checkpoints, the newest ones; 0 means all.
    pub keep_last: usize,
    /// Write behind the steps that follow, from a copy of the state, rather than between two steps.
    #[serde(rename = "async")]
    pub is_async: bool,
}

impl CheckpointConfig {
    pub(super) fn read(origin: &Origin, table: Table) -> Result<CheckpointConfig, ConfigError> {
        let reader = Reader::open(origin, "checkpoint", table, KEYS)?;
        Ok(CheckpointConfig {
            every: reader.or("every", COUNT, 0)?,
            keep_last: reader.or("keep_last", SIZE_OR_ZERO, 2)?,
            is_async: reader.or("async", BOOL, true)?,
        })
    }

    /// Whether a checkpoint is due after so many of `steps` steps.
    pub fn is_due(&self, done: u64, steps: u64) -> bool {
        self.every > 0 && (done.is_multiple_of(self.every) || done == steps)
    }
}
