//! Settings of a transfer: memory, threads, progress reports and cancellation.

use std::{
    num::NonZero,
    sync::atomic::{AtomicBool, Ordering},
};

use crate::error::Error;

/// Receives the progress of long operations. Called from several threads.
pub trait Progress: Sync {
    /// An operation on this many bytes starts.
    fn begin(&self, total_bytes: u64);

    /// This many more bytes are done.
    fn advance(&self, bytes: u64);
}

/// Ignores progress.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn begin(&self, _: u64) {}

    fn advance(&self, _: u64) {}
}

/// Default window of [`Options::new`], in bytes.
pub const WINDOW_BYTES: usize = 256 << 20;

/// Settings of a transfer.
#[derive(Clone, Copy)]
pub struct Options<'a> {
    /// Maximum total size of all buffers, in bytes.
    pub window_bytes: usize,
    /// Number of threads that read, convert and write.
    pub threads: NonZero<usize>,
    /// Whether the output is made durable before it gets its name.
    pub sync: bool,
    /// Receives the progress.
    pub progress: &'a dyn Progress,
    /// Set by the caller to stop the operation, which then fails and leaves nothing behind.
    pub cancel: &'a AtomicBool,
}

impl<'a> Options<'a> {
    /// Returns the default settings: the default window, one thread per core, durable outputs.
    pub fn new(progress: &'a dyn Progress, cancel: &'a AtomicBool) -> Options<'a> {
        let threads = std::thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN);
        Options { window_bytes: WINDOW_BYTES, threads, sync: true, progress, cancel }
    }

    /// Returns an error if the caller has asked to stop.
    pub(crate) fn check_cancel(&self) -> Result<(), Error> {
        if self.cancel.load(Ordering::Relaxed) { Err(Error::Canceled) } else { Ok(()) }
    }
}
