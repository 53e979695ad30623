//! Verifies a checkpoint by reading all of it: whether its tensors are complete, its checksums match and every byte can
//! be read, and which bytes are unprotected.
//!
//! All problems are collected, not only the first: a user wants to know whether one file or all of them are damaged.
//! Bytes count as protected if a checksum of the format covers them; a compressed item counts as a whole if any of its
//! decoded bytes are covered.

use std::{
    collections::BTreeMap,
    ops::Range,
    path::PathBuf,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{
    checkpoint::{Checkpoint, Source},
    error::Error,
    file_io::Files,
    formats::{Unread, beside},
    lock::{lock, unlocked},
    transfer::{Options, PieceSizes, Pieces, SourceFiles, TensorReader, in_threads, needed},
};

/// The result of verifying a checkpoint.
#[derive(Debug, Default)]
pub struct Verification {
    /// Number of tensors that were checked for completeness.
    pub tensors: usize,
    /// Bytes of files that were read.
    pub read_bytes: u64,
    /// Number of checksums that were compared.
    pub checksums: usize,
    /// Files with bytes that no checksum covers.
    pub unprotected: Vec<Unprotected>,
    /// Other checkpoints in the same directory, which were read too.
    pub beside: Vec<Checkpoint>,
    /// Other content of the directory, which was not read.
    pub unread: Vec<Unread>,
    /// All problems, each naming the file and the tensor or byte range.
    pub problems: Vec<Error>,
}

/// The bytes of a file that no checksum covers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unprotected {
    /// The file.
    pub path: PathBuf,
    /// Unprotected byte ranges: non-empty, in order, and separated by protected bytes.
    pub ranges: Vec<Range<u64>>,
}

impl Unprotected {
    /// Total number of unprotected bytes.
    pub fn bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.end - range.start).sum()
    }
}

impl Verification {
    /// Whether no problem was found.
    pub fn is_sound(&self) -> bool {
        self.problems.is_empty()
    }

    /// Total number of unprotected bytes in all files.
    pub fn unprotected_bytes(&self) -> u64 {
        self.unprotected.iter().map(Unprotected::bytes).sum()
    }
}

/// Reads and verifies the checkpoint and, if it is a directory, everything else in it, so that the verdict covers the
/// whole directory.
///
/// # Errors
/// Those of [`verify`].
pub fn verify_all(checkpoint: &Checkpoint, options: &Options) -> Result<Verification, Error> {
    let mut found = verify(checkpoint, options)?;
    if checkpoint.tensors.is_empty() {
        let reason = "no tensor was found in it, so there is nothing to verify; name the files or folders \
                      that hold them";
        found.problems.push(Error::malformed(&checkpoint.path, reason));
    }
    let beside = beside(checkpoint);
    for other in beside.checkpoints {
        let of_other = verify(&other, options)?;
        found.add(other, of_other);
    }
    found.problems.extend(beside.problems);
    found.unread = beside.unread;
    Ok(found)
}

impl Verification {
    /// Adds the result for another checkpoint in the same directory.
    fn add(&mut self, checkpoint: Checkpoint, other: Verification) {
        self.beside.push(checkpoint);
        self.tensors += other.tensors;
        self.read_bytes += other.read_bytes;
        self.checksums += other.checksums;
        self.unprotected.extend(other.unprotected);
        self.problems.extend(other.problems);
    }
}

/// A unit of reading: a file, or a compressed item of one.
struct Item<'a> {
    path: &'a PathBuf,
    /// The plain sources that refer to this file, or the one compressed source.
    sources: Vec<usize>,
    range: Range<u64>,
    is_zstd: bool,
}

/// Reads and verifies everything.
///
/// # Errors
/// [`Error::Canceled`] only; problems of the checkpoint are part of the result.
pub fn verify(checkpoint: &Checkpoint, options: &Options) -> Result<Verification, Error> {
    let mut found = Verification { tensors: checkpoint.tensors.len(), ..Verification::default() };
    let mut readers = Vec::new();
    for (name, tensor) in &checkpoint.tensors {
        match tensor.check_coverage(&checkpoint.sources) {
            Ok(()) => readers.push(TensorReader::new(name, tensor)),
            Err(problem) => found.problems.push(problem),
        }
    }
    let needed = needed(readers.iter(), |source| checkpoint.sources[source].is_compressed());
    let sources = SourceFiles::new(&Files::anywhere(), checkpoint);
    let items = items(checkpoint);
    let len = |range: &Range<u64>| range.end - range.start;
    let piece_bytes = PieceSizes::of(options).usual as u64;
    let pieces = Pieces::new(
        items
            .iter()
            .map(|item| (item.range.clone(), if item.is_zstd { len(&item.range) } else { piece_bytes })),
    );
    options.progress.begin(items.iter().map(|item| len(&item.range)).sum());
    let read_bytes = AtomicU64::new(0);
    let problems = Mutex::new(BTreeMap::new());
    in_threads(options, |buffer: &mut Vec<u8>| {
        let Some((number, range)) = pieces.next() else { return Ok(false) };
        let (item, len) = (&items[number], len(&range));
        let needed = needed.get(&item.sources[0]).copied().unwrap_or(0);
        match read(&sources, item, range, needed, options, buffer) {
            Ok(()) => _ = read_bytes.fetch_add(len, Ordering::Relaxed),
            Err(error) if matches!(error, Error::Canceled) || error.is_unanswered() => return Err(error),
            Err(error) => {
                // Report one problem per file: the rest of a truncated file fails as well.
                lock(&problems).entry(item.path.clone()).or_insert(error);
            }
        }
        options.progress.advance(len);
        Ok(true)
    })?;
    found.problems.extend(unlocked(problems).into_values());
    found.problems.extend(sources.checks.problems());
    found.read_bytes = read_bytes.into_inner();
    found.checksums = sources.checks.complete();
    found.unprotected = unprotected(checkpoint, &items);
    Ok(found)
}

/// Lists the items to read: compressed items first, each read sequentially by one thread, then files.
fn items(checkpoint: &Checkpoint) -> Vec<Item<'_>> {
    let mut items = Vec::new();
    let mut files: BTreeMap<&PathBuf, Item> = BTreeMap::new();
    for (number, source) in checkpoint.sources.iter().enumerate() {
        match source {
            Source::Zstd { path, range, .. } => {
                items.push(Item { path, sources: vec![number], range: range.clone(), is_zstd: true });
            }
            Source::Inline { path, stream, .. } => {
                items.push(Item {
                    path,
                    sources: vec![number],
                    range: 0..stream.len() as u64,
                    is_zstd: true,
                });
            }
            Source::File { path, len } => {
                let none = Item { path, sources: Vec::new(), range: 0..0, is_zstd: false };
                let file = files.entry(path).or_insert(none);
                file.sources.push(number);
                file.range.end = file.range.end.max(*len);
            }
        }
    }
    items.extend(files.into_values());
    items
}

fn read(
    sources: &SourceFiles,
    item: &Item,
    range: Range<u64>,
    needed: u64,
    options: &Options,
    buffer: &mut Vec<u8>,
) -> Result<(), Error> {
    if item.is_zstd {
        return sources.decode(item.sources[0], needed, options, &mut |_, _| Ok(()));
    }
    buffer.resize((range.end - range.start) as usize, 0);
    sources.read(item.sources[0], range.start, "", buffer)?;
    for &other in &item.sources[1..] {
        sources.checks.observe(other, range.start, buffer);
    }
    Ok(())
}

/// Returns the bytes of each file that no checksum covers.
fn unprotected(checkpoint: &Checkpoint, items: &[Item]) -> Vec<Unprotected> {
    let mut covered: BTreeMap<&PathBuf, Vec<Range<u64>>> = BTreeMap::new();
    for protection in &checkpoint.protections {
        match &checkpoint.sources[protection.source] {
            Source::File { path, .. } => covered.entry(path).or_default().push(protection.range.clone()),
            Source::Zstd { path, range, .. } => covered.entry(path).or_default().push(range.clone()),
            // The metadata that holds it has its own checksum.
            Source::Inline { .. } => {}
        }
    }
    let mut lens: BTreeMap<&PathBuf, u64> = BTreeMap::new();
    for item in items {
        let len = lens.entry(item.path).or_default();
        *len = item.range.end.max(*len);
    }
    let rest = lens.into_iter().map(|(path, len)| {
        let ranges = gaps(covered.remove(path).unwrap_or_default(), len);
        Unprotected { path: path.clone(), ranges }
    });
    rest.filter(|file| !file.ranges.is_empty()).collect()
}

/// Returns the parts of `0..len` that `covered` does not contain.
fn gaps(mut covered: Vec<Range<u64>>, len: u64) -> Vec<Range<u64>> {
    covered.retain(|range| !range.is_empty());
    covered.sort_by_key(|range| range.start);
    covered.push(len..len);
    let mut end = 0;
    let gaps = covered.into_iter().map(|range| {
        let gap = end..range.start.min(len);
        end = range.end.max(end);
        gap
    });
    gaps.filter(|gap| !gap.is_empty()).collect()
}

#[cfg(test)]
mod tests;
