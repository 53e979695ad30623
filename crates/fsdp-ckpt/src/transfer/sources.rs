//! The bytes of a checkpoint's sources: plain files by positioned reads, compressed items once they have been
//! decoded to a spool.

use std::{
    collections::BTreeMap,
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use super::{
    Options,
    checks::Checks,
    elements::TensorReader,
    open_files::{OpenFiles, Purpose},
    run::{in_threads, piece_sizes},
    spool::Spool,
    work::needed,
};
use crate::{
    checkpoint::{Checkpoint, Source},
    digest::Digest,
    error::{Error, TransferFault},
    file_io::{Files, PathFile},
};

/// The sources of a checkpoint, readable by any number of threads.
#[derive(Debug)]
pub(crate) struct SourceFiles<'a> {
    pub(crate) checkpoint: &'a Checkpoint,
    /// The number in `open` of the file of each source.
    file_of: Vec<usize>,
    open: OpenFiles,
    pub(crate) checks: Checks<'a>,
    spool: Option<Spool>,
}

impl<'a> SourceFiles<'a> {
    pub(crate) fn new(files: &Files, checkpoint: &'a Checkpoint) -> SourceFiles<'a> {
        let mut numbers: BTreeMap<&PathBuf, usize> = BTreeMap::new();
        let mut paths = Vec::new();
        let file_of = checkpoint.sources.iter().map(|source| {
            *numbers.entry(source.path()).or_insert_with(|| {
                paths.push(source.path().clone());
                paths.len() - 1
            })
        });
        let file_of = file_of.collect();
        let open = OpenFiles::new(files.clone(), paths, Purpose::Reading);
        SourceFiles { checkpoint, file_of, open, checks: Checks::new(checkpoint), spool: None }
    }

    /// Decodes the first bytes of compressed sources (pairs of source and length) to a nameless file in `dir`,
    /// so that they can be read in any order.
    pub(super) fn spool(
        &mut self,
        files: &Files,
        dir: &Path,
        needed: &BTreeMap<usize, u64>,
        options: &Options,
    ) -> Result<(), Error> {
        if needed.is_empty() {
            return Ok(());
        }
        let spool = Spool::new(files, dir, needed)?;
        let order: Vec<usize> = needed.keys().copied().collect();
        let next = AtomicUsize::new(0);
        in_threads(options, |(): &mut ()| {
            let Some(&source) = order.get(next.fetch_add(1, Ordering::Relaxed)) else { return Ok(false) };
            spool.fill(self, source, piece_sizes(options).usual, options.cancel).map(|()| true)
        })?;
        self.spool = Some(spool);
        Ok(())
    }

    /// Spools what tensors need of the sources for which `is_wanted` holds.
    pub(crate) fn spool_where<'r>(
        &mut self,
        dir: &Path,
        readers: impl Iterator<Item = &'r TensorReader<'r>>,
        is_wanted: impl Fn(usize) -> bool,
        options: &Options,
    ) -> Result<(), Error> {
        self.spool(&Files::anywhere(), dir, &needed(readers, is_wanted), options)
    }

    /// Reads bytes of a source, for `tensor`, and holds them against the checksums of the checkpoint. Returns
    /// their digest if one was computed.
    pub(crate) fn read(
        &self,
        source: usize,
        offset: u64,
        tensor: &str,
        out: &mut [u8],
    ) -> Result<Option<Digest>, Error> {
        match &self.checkpoint.sources[source] {
            Source::File { path, len } => {
                let range = offset..offset.saturating_add(out.len() as u64);
                if range.end > *len {
                    let (tensor, path) = (tensor.to_owned(), path.clone());
                    return Err(TransferFault::BeyondSource { tensor, path, range, len: *len }.into());
                }
                self.file(source)?.read_exact_at(out, offset)?;
                Ok(self.checks.observe(source, offset, out))
            }
            // Decoding has observed the checksums already.
            Source::Zstd { .. } => {
                let spool = self.spool.as_ref().expect("compressed sources that are read were spooled");
                spool.read(source, offset, out).map(|()| None)
            }
        }
    }

    /// Reads the unread rest of every protected range that was read in part, so that all that was used is
    /// judged.
    pub(crate) fn complete_checks(&self, options: &Options) -> Result<(), Error> {
        let rest = self.checks.rest();
        let next = Mutex::new((0, 0));
        let piece_bytes = piece_sizes(options).usual as u64;
        let next_piece = || {
            // A panic of another thread leaves a valid state.
            let mut next = next.lock().unwrap_or_else(PoisonError::into_inner);
            let (number, done) = *next;
            let (source, range): &(usize, Range<u64>) = rest.get(number)?;
            let start = range.start + done;
            let end = range.end.min(start + piece_bytes);
            *next = if end == range.end { (number + 1, 0) } else { (number, end - range.start) };
            Some((*source, start..end))
        };
        in_threads(options, |buffer: &mut Vec<u8>| {
            let Some((source, range)) = next_piece() else { return Ok(false) };
            buffer.resize((range.end - range.start) as usize, 0);
            self.read(source, range.start, "", buffer).map(|_| true)
        })
    }

    /// The open file of a source.
    pub(super) fn file(&self, source: usize) -> Result<Arc<PathFile>, Error> {
        self.open.get(self.file_of[source])
    }
}
