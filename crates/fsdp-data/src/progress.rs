//! Progress of reading and tokenizing data.

use std::fmt;
use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Progress of tokenizing a set of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tokenizing {
    /// Bytes of the files, in their size on disk, that were read and tokenized.
    pub read_bytes: u64,
    /// Bytes of all files, in their size on disk.
    pub all_bytes: u64,
    /// Number of documents tokenized.
    pub documents: u64,
    /// Number of their tokens.
    pub tokens: u64,
    /// Whether tokenizing is complete.
    pub is_done: bool,
}

/// Receives the progress of tokenizing. Called by one thread at a time.
pub struct Watch<'a>(Option<&'a (dyn Fn(Tokenizing) + Sync)>);

impl<'a> Watch<'a> {
    /// Ignores the progress.
    pub const NONE: Watch<'static> = Watch(None);

    /// Calls a function with the progress.
    pub fn new(report: &'a (dyn Fn(Tokenizing) + Sync)) -> Watch<'a> {
        Watch(Some(report))
    }

    pub(super) fn report(&self, tokenizing: Tokenizing) {
        if let Some(report) = self.0 {
            report(tokenizing);
        }
    }
}

impl fmt::Debug for Watch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Watch({})", self.0.is_some())
    }
}

/// Counts bytes of files as they are read.
#[derive(Clone, Debug, Default)]
pub(super) struct Meter(Arc<AtomicU64>);

impl Meter {
    /// Adds bytes that were read.
    pub(super) fn add(&self, bytes: u64) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Number of bytes read so far.
    pub(super) fn total(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A reader whose bytes are counted.
pub(super) struct Metered<R> {
    /// The reader.
    pub(super) inner: R,
    /// The counter.
    pub(super) meter: Meter,
}

impl<R: Read> Read for Metered<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.meter.add(count as u64);
        Ok(count)
    }
}
