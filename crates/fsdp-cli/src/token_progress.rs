//! How far the tokenizing of data is.

use std::sync::{Mutex, PoisonError};

use fsdp_ckpt::transfer::Progress;
use fsdp_train::data::Tokenizing;

use crate::byte_progress::ByteProgress;

/// Tells a user how far data is read, on stderr. What it has drawn disappears when it is dropped.
#[derive(Debug)]
pub(crate) struct TokenProgress {
    bytes: ByteProgress,
    /// How many bytes of the files that are read now were told; none between two sets of files.
    told: Mutex<Option<u64>>,
}

impl TokenProgress {
    /// The progress of reading that begins now.
    pub(crate) fn new() -> Self {
        Self { bytes: ByteProgress::new("tokenizing: "), told: Mutex::new(None) }
    }

    /// Takes in how far it is.
    pub(crate) fn tell(&self, now: Tokenizing) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let before = told.unwrap_or_else(|| {
            self.bytes.begin(now.all_bytes);
            0
        });
        // What is not looked at, such as other columns, is done when all is.
        let read = if now.is_done { now.all_bytes } else { now.read_bytes.min(now.all_bytes) };
        self.bytes.advance(read.saturating_sub(before));
        *told = (!now.is_done).then_some(read);
    }
}
