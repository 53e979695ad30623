//! Reads the bytes of a checkpoint's sources: plain files by positioned reads, compressed items after they have been
//! decoded to a spool.

use std::{
    collections::BTreeMap,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    checks::Checks,
    open_files::OpenFiles,
    options::Options,
    parts::{TensorReader, needed},
    spool::Spool,
    threads::{PieceSizes, Pieces, each_in_threads, in_threads},
    zstd_stream::{EachPiece, Stream},
};
use crate::{
    bytes::RangeReader,
    checkpoint::{Checkpoint, Source},
    digest::Digest,
    error::Error,
    file_io::{Files, PathFile},
    files::Access,
};

/// The files of a checkpoint's sources, opened on demand.
#[derive(Debug)]
pub(crate) struct OpenSources {
    /// For each source, the number of its file in `open`.
    file_of: Vec<usize>,
    open: OpenFiles,
}

impl OpenSources {
    pub(crate) fn new(files: &Files, checkpoint: &Checkpoint) -> OpenSources {
        let mut numbers: BTreeMap<&PathBuf, usize> = BTreeMap::new();
        let mut paths = Vec::new();
        let file_of = checkpoint.sources.iter().map(|source| {
            *numbers.entry(source.path()).or_insert_with(|| {
                paths.push(source.path().clone());
                paths.len() - 1
            })
        });
        let file_of = file_of.collect();
        OpenSources { file_of, open: OpenFiles::new(files.clone(), paths, Access::Read) }
    }
}

/// The sources of a checkpoint, readable by any number of threads.
#[derive(Debug)]
pub(crate) struct SourceFiles<'a> {
    pub(crate) checkpoint: &'a Checkpoint,
    opened: Arc<OpenSources>,
    pub(crate) checks: Checks<'a>,
    spool: Option<Spool>,
}

impl<'a> SourceFiles<'a> {
    pub(crate) fn new(files: &Files, checkpoint: &'a Checkpoint) -> SourceFiles<'a> {
        let opened = Arc::new(OpenSources::new(files, checkpoint));
        SourceFiles { checkpoint, opened, checks: Checks::new(checkpoint), spool: None }
    }

    /// Opens the sources of a checkpoint whose checksums were already verified: they are not verified again.
    pub(crate) fn checked_before(checkpoint: &'a Checkpoint, opened: &Arc<OpenSources>) -> SourceFiles<'a> {
        SourceFiles { checkpoint, opened: opened.clone(), checks: Checks::none(checkpoint), spool: None }
    }

    /// Decodes the first bytes of compressed sources (length by source) to an unnamed file in `dir`, so that they can
    /// be read in any order.
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
        each_in_threads(options, &order, |&source| {
            let len = needed[&source];
            self.decode(source, len, options, &mut |position, bytes| spool.keep(source, position, bytes))
        })?;
        self.spool = Some(spool);
        Ok(())
    }

    /// Spools the bytes that tensors need, of the sources for which `is_wanted` holds.
    pub(crate) fn spool_where<'r>(
        &mut self,
        dir: &Path,
        readers: impl Iterator<Item = &'r TensorReader<'r>>,
        is_wanted: impl Fn(usize) -> bool,
        options: &Options,
    ) -> Result<(), Error> {
        self.spool(&Files::anywhere(), dir, &needed(readers, is_wanted), options)
    }

    /// Reads bytes of a source, for `tensor`, and passes them to the checks against the checkpoint's checksums. Returns
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
                    let Range { start, end } = range;
                    let reason = format!(
                        "tensor `{tensor}` needs bytes {start}..{end} of it, but it has {len}; fetch or save the file again"
                    );
                    return Err(Error::malformed(path, reason));
                }
                self.file(source)?.read_exact_at(out, offset)?;
                Ok(self.checks.observe(source, offset, out))
            }
            // The checksums were computed while decoding.
            Source::Zstd { .. } | Source::Inline { .. } => {
                let spool = self.spool.as_ref().expect("compressed sources that are read were spooled");
                spool.read(source, offset, out).map(|()| None)
            }
        }
    }

    /// Reads the unread rest of every protected range that was read in part, so that everything used is verified.
    pub(crate) fn complete_checks(&self, options: &Options) -> Result<(), Error> {
        let rest = self.checks.rest();
        let piece_bytes = PieceSizes::of(options).usual as u64;
        let pieces = Pieces::new(rest.iter().map(|(_, range)| (range.clone(), piece_bytes)));
        in_threads(options, |buffer: &mut Vec<u8>| {
            let Some((number, range)) = pieces.next() else { return Ok(false) };
            buffer.resize((range.end - range.start) as usize, 0);
            self.read(rest[number].0, range.start, "", buffer).map(|_| true)
        })
    }

    /// Decodes a compressed source sequentially, and passes it to the checks against the checkpoint's checksums. `each`
    /// gets pieces as in [`Stream::decode`]; at least `needed` bytes must be decoded.
    pub(crate) fn decode(
        &self,
        source: usize,
        needed: u64,
        options: &Options,
        each: &mut EachPiece,
    ) -> Result<(), Error> {
        let observe = |position, bytes: &[u8]| _ = self.checks.observe(source, position, bytes);
        let from = &self.checkpoint.sources[source];
        let stream = |what| Stream { path: from.path(), what, needed, len_max: from.len_max() };
        match from {
            Source::File { .. } => unreachable!("only compressed sources are decoded"),
            Source::Zstd { range, .. } => {
                let compressed = RangeReader { file: &*self.file(source)?, range: range.clone() };
                let what = format!("the zstd stream in its bytes {}..{}", range.start, range.end);
                stream(what).decode(compressed, options, &observe, each)
            }
            Source::Inline { key, stream: compressed, .. } => {
                stream(format!("the zstd stream of `{key}`")).decode(&**compressed, options, &observe, each)
            }
        }
    }

    /// Returns the open file of a source.
    fn file(&self, source: usize) -> Result<Arc<PathFile>, Error> {
        self.opened.open.get(self.opened.file_of[source])
    }
}
