//! How far reading has come, for those who wait for it.

use std::fmt;
use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How far the tokenizing of a set of files is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tokenizing {
    /// Bytes of the files, as they lie on the disk, that were read and have become tokens.
    pub read_bytes: u64,
    /// All of their bytes.
    pub all_bytes: u64,
    /// Documents that have become tokens.
    pub documents: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Whether it is over.
    pub is_done: bool,
}

/// Who is told how far reading is. Called by one thread at a time.
pub struct Watch<'a>(Option<&'a (dyn Fn(Tokenizing) + Sync)>);

impl<'a> Watch<'a> {
    /// Tells nobody.
    pub const NOBODY: Watch<'static> = Watch(None);

    /// Tells a function.
    pub fn new(told: &'a (dyn Fn(Tokenizing) + Sync)) -> Watch<'a> {
        Watch(Some(told))
    }

    pub(super) fn tell(&self, tokenizing: Tokenizing) {
        if let Some(told) = self.0 {
            told(tokenizing);
        }
    }
}

impl fmt::Debug for Watch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Watch({})", self.0.is_some())
    }
}

/// Counts bytes of files while they are read.
#[derive(Clone, Debug, Default)]
pub(super) struct Meter(Arc<AtomicU64>);

impl Meter {
    /// Notes bytes that were read.
    pub(super) fn add(&self, bytes: u64) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }

    /// All bytes that were noted.
    pub(super) fn total(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A reader whose bytes are counted.
pub(super) struct Metered<R> {
    /// What is read.
    pub(super) inner: R,
    /// What counts.
    pub(super) meter: Meter,
}

impl<R: Read> Read for Metered<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.meter.add(count as u64);
        Ok(count)
    }
}
