//! How bytes are moved: with how much memory and how many threads, who is told, and who can stop it.

use std::{
    num::NonZero,
    sync::atomic::{AtomicBool, Ordering},
};

use crate::error::Error;

/// Who is told how far long work has come. Called from several threads.
pub trait Progress: Sync {
    /// Work of this many bytes begins.
    fn begin(&self, total_bytes: u64);

    /// This many more bytes are done.
    fn advance(&self, bytes: u64);
}

/// Nobody.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn begin(&self, _: u64) {}

    fn advance(&self, _: u64) {}
}

/// The window of [`Options::new`].
pub const WINDOW_BYTES: usize = 256 << 20;

/// How bytes are moved.
#[derive(Clone, Copy)]
pub struct Options<'a> {
    /// Bytes that all buffers together may take.
    pub window_bytes: usize,
    /// Threads that read, convert and write.
    pub threads: NonZero<usize>,
    /// Whether the output is durable before it gets its name.
    pub sync: bool,
    /// Who is told how far the work has come.
    pub progress: &'a dyn Progress,
    /// Set from outside to stop the work, which then fails and leaves nothing behind.
    pub cancel: &'a AtomicBool,
}

impl<'a> Options<'a> {
    /// The usual window, a thread per core, durable outputs.
    pub fn new(progress: &'a dyn Progress, cancel: &'a AtomicBool) -> Options<'a> {
        let threads = std::thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN);
        Options { window_bytes: WINDOW_BYTES, threads, sync: true, progress, cancel }
    }

    /// Fails once the caller has asked to stop.
    pub(crate) fn check_cancel(&self) -> Result<(), Error> {
        if self.cancel.load(Ordering::Relaxed) { Err(Error::Canceled) } else { Ok(()) }
    }
}
