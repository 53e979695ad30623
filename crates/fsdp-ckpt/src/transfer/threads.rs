//! Work in threads: how it is handed out, in what size, and what happens when a thread fails.

use std::{
    ops::Range,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use super::options::Options;
use crate::{
    error::Error,
    lock::{lock, unlocked},
};

/// Bytes per piece: large enough that the cost of system calls does not matter, small enough for the cache of a core.
const PIECE_BYTES: usize = 1 << 20;

/// Number of buffers per thread: for reading, for writing, and for sorting strided elements.
const BUFFERS: usize = 3;

/// Minimum size of a buffer, in bytes, for windows that are too small: a few elements.
const BUFFER_BYTES_MIN: usize = 64;

/// Piece sizes with which the buffers of all threads fit into the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PieceSizes {
    /// Bytes per piece.
    pub(crate) usual: usize,
    /// Bytes per piece of a tensor that needs large pieces.
    pub(crate) large: usize,
}

impl PieceSizes {
    pub(crate) fn of(options: &Options) -> PieceSizes {
        let large = (options.window_bytes / (BUFFERS * options.threads.get())).max(BUFFER_BYTES_MIN);
        PieceSizes { usual: large.min(PIECE_BYTES), large }
    }
}

/// Calls `work` in every thread until it returns `false` there, a call fails, or the caller cancels.
pub(crate) fn in_threads<S: Default>(
    options: &Options,
    work: impl Fn(&mut S) -> Result<bool, Error> + Sync,
) -> Result<(), Error> {
    let failure: Mutex<Option<Error>> = Mutex::new(None);
    let is_stopped = AtomicBool::new(false);
    let one_thread = || {
        let mut state = S::default();
        while !is_stopped.load(Ordering::Relaxed) {
            match options.check_cancel().and_then(|()| work(&mut state)) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    is_stopped.store(true, Ordering::Relaxed);
                    lock(&failure).get_or_insert(error);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..options.threads.get() {
            // Where the system has no more threads, those that there are do all of the work.
            if std::thread::Builder::new().spawn_scoped(scope, one_thread).is_err() {
                break;
            }
        }
        one_thread();
    });
    unlocked(failure).map_or(Ok(()), Err)
}

/// Calls `work` with each of the items, in threads.
pub(crate) fn each_in_threads<T: Sync>(
    options: &Options,
    items: &[T],
    work: impl Fn(&T) -> Result<(), Error> + Sync,
) -> Result<(), Error> {
    let next = AtomicUsize::new(0);
    in_threads(options, |(): &mut ()| {
        let item = items.get(next.fetch_add(1, Ordering::Relaxed));
        item.map_or(Ok(false), |item| work(item).map(|()| true))
    })
}

/// Ranges that are handed out in pieces, one after another, to any number of threads.
pub(crate) struct Pieces {
    /// Each range with the length of its pieces.
    ranges: Vec<(Range<u64>, u64)>,
    /// The index of the current range, and how much of it was handed out.
    next: Mutex<(usize, u64)>,
}

impl Pieces {
    pub(crate) fn new(ranges: impl IntoIterator<Item = (Range<u64>, u64)>) -> Pieces {
        Pieces { ranges: ranges.into_iter().collect(), next: Mutex::default() }
    }

    /// Returns the next piece, with the index of its range. An empty range has one empty piece.
    pub(crate) fn next(&self) -> Option<(usize, Range<u64>)> {
        let mut next = lock(&self.next);
        let (number, done) = *next;
        let (range, len) = self.ranges.get(number)?;
        let start = range.start + done;
        let end = range.end.min(start + len);
        *next = if end == range.end { (number + 1, 0) } else { (number, end - range.start) };
        Some((number, start..end))
    }
}
