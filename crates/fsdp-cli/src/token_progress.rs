//! Progress of tokenizing data.

use std::sync::{Mutex, PoisonError};

use fsdp_ckpt::transfer::Progress;
use fsdp_data::Tokenizing;

use crate::byte_progress::ByteProgress;

/// Shows on stderr how much data is read. The bar is removed on drop.
#[derive(Debug)]
pub(crate) struct TokenProgress {
    bytes: ByteProgress,
    /// Bytes reported so far for the current set of files; `None` between two sets.
    reported: Mutex<Option<u64>>,
}

impl TokenProgress {
    /// Starts showing progress.
    pub(crate) fn new() -> Self {
        Self { bytes: ByteProgress::new("tokenizing: "), reported: Mutex::new(None) }
    }

    /// Updates the progress.
    pub(crate) fn update(&self, now: Tokenizing) {
        let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        let before = reported.unwrap_or_else(|| {
            self.bytes.begin(now.all_bytes);
            0
        });
        // Parts that are not read, such as other columns, count at the end.
        let read = if now.is_done { now.all_bytes } else { now.read_bytes.min(now.all_bytes) };
        self.bytes.advance(read.saturating_sub(before));
        *reported = (!now.is_done).then_some(read);
    }
}
