//! Compressed items decoded to a nameless temporary file, for whoever reads them in another order than they
//! lie: strided chunks, and comparisons.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{
    error::Error,
    file_io::{Files, PathFile},
};

/// Tells temporary files of one process apart.
static COUNT: AtomicU64 = AtomicU64::new(0);

/// Decoded items, one after another in a file that has no name any more.
#[derive(Debug)]
pub(super) struct Spool {
    writing: PathFile,
    reading: PathFile,
    /// Where the decoded bytes of each source begin, and how many of them are kept.
    places: BTreeMap<usize, (u64, u64)>,
}

impl Spool {
    /// Makes room in `dir` for the first bytes of sources: pairs of source and length.
    pub(super) fn new(files: &Files, dir: &Path, needed: &BTreeMap<usize, u64>) -> Result<Spool, Error> {
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = dir.join(format!(".fsdp-spool-{}-{number}", std::process::id()));
        let writing = files.create_new(&path)?;
        let reading = files.open(&path);
        // From here on the file goes away with its handles, however the process ends.
        files.remove_if_there(&path)?;
        let mut end = 0;
        let places = needed.iter().map(|(&source, &len)| {
            end += len;
            (source, (end - len, len))
        });
        Ok(Spool { writing, reading: reading?.0, places: places.collect() })
    }

    /// Keeps decoded bytes of a source, as far as any are to be kept there.
    pub(super) fn keep(&self, source: usize, position: u64, bytes: &[u8]) -> Result<(), Error> {
        let (start, len) = self.places[&source];
        let kept = len.saturating_sub(position).min(bytes.len() as u64);
        self.writing.write_all_at(&bytes[..kept as usize], start + position)
    }

    /// Reads decoded bytes of a source that were kept.
    pub(super) fn read(&self, source: usize, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        let (start, len) = self.places[&source];
        assert!(offset + out.len() as u64 <= len, "tensors are read from what was kept of their source");
        self.reading.read_exact_at(out, start + offset)
    }
}
