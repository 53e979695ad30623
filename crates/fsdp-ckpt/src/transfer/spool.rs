//! Compressed items decoded to an unnamed temporary file, for readers that need another order than the stored one:
//! strided chunks, and comparisons.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{
    error::Error,
    file_io::{Files, PathFile},
};

/// Distinguishes the temporary files of one process.
static COUNT: AtomicU64 = AtomicU64::new(0);

/// Decoded items, one after another, in a file whose name has been removed.
#[derive(Debug)]
pub(super) struct Spool {
    writing: PathFile,
    reading: PathFile,
    /// For each source, the offset of its decoded bytes in the file, and their number.
    places: BTreeMap<usize, (u64, u64)>,
}

impl Spool {
    /// Creates the file in `dir` and assigns space to the first bytes of each source (length by source).
    pub(super) fn new(files: &Files, dir: &Path, needed: &BTreeMap<usize, u64>) -> Result<Spool, Error> {
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = dir.join(format!(".fsdp-spool-{}-{number}", std::process::id()));
        let writing = files.create_new(&path)?;
        let reading = files.open(&path);
        // From here on the file disappears with its handles, however the process ends.
        files.remove_if_there(&path)?;
        let mut end = 0;
        let places = needed.iter().map(|(&source, &len)| {
            end += len;
            (source, (end - len, len))
        });
        Ok(Spool { writing, reading: reading?.0, places: places.collect() })
    }

    /// Stores decoded bytes of a source, up to the length that is kept of it.
    pub(super) fn keep(&self, source: usize, position: u64, bytes: &[u8]) -> Result<(), Error> {
        let (start, len) = self.places[&source];
        let kept = len.saturating_sub(position).min(bytes.len() as u64);
        self.writing.write_all_at(&bytes[..kept as usize], start + position)
    }

    /// Reads stored bytes of a source.
    pub(super) fn read(&self, source: usize, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        let (start, len) = self.places[&source];
        assert!(offset + out.len() as u64 <= len, "tensors are read from what was kept of their source");
        self.reading.read_exact_at(out, start + offset)
    }
}
