//! Reading all of a checkpoint: are its tensors whole, do its checksums match, can every byte be read, and
//! which bytes does nothing protect.
//!
//! Everything that is wrong is collected, not only the first: a person wants to know whether one file or all of
//! them are damaged. Bytes count as protected when a checksum of the format covers them; a compressed item
//! counts as a whole, when any of its decoded bytes are covered.

use std::{
    collections::BTreeMap,
    ops::Range,
    path::PathBuf,
    sync::{
        Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use crate::{
    checkpoint::{Checkpoint, Source},
    error::Error,
    file_io::Files,
    lock::{lock, unlocked},
    transfer::{Options, PieceSizes, Pieces, SourceFiles, in_threads},
};

/// What verifying a checkpoint found.
#[derive(Debug, Default)]
pub struct Verification {
    /// Tensors that were checked to be whole.
    pub tensors: usize,
    /// Bytes of files that were read.
    pub read_bytes: u64,
    /// Checksums that were compared.
    pub checksums: usize,
    /// Files with bytes that no checksum covers.
    pub unprotected: Vec<Unprotected>,
    /// Everything that is wrong, each naming the file and the tensor or byte range.
    pub problems: Vec<Error>,
}

/// The bytes of a file that no checksum covers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unprotected {
    /// The file.
    pub path: PathBuf,
    /// Its bytes without protection: none empty, in order, and with protected bytes between them.
    pub ranges: Vec<Range<u64>>,
}

impl Unprotected {
    /// How many bytes these are.
    pub fn bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.end - range.start).sum()
    }
}

impl Verification {
    /// Whether nothing is wrong.
    pub fn is_sound(&self) -> bool {
        self.problems.is_empty()
    }

    /// Bytes of all files that no checksum covers.
    pub fn unprotected_bytes(&self) -> u64 {
        self.unprotected.iter().map(Unprotected::bytes).sum()
    }
}

/// A file with the plain sources that are this file.
struct PlainFile<'a> {
    path: &'a PathBuf,
    sources: Vec<usize>,
    len: u64,
}

/// Something that one thread reads.
enum Job<'a> {
    /// Bytes of a file.
    Plain(&'a PlainFile<'a>, Range<u64>),
    /// A compressed item: the source, its file and its bytes there.
    Zstd(usize, &'a PathBuf, Range<u64>),
}

impl Job<'_> {
    fn len(&self) -> u64 {
        let (Job::Plain(_, range) | Job::Zstd(_, _, range)) = self;
        range.end - range.start
    }

    fn path(&self) -> &PathBuf {
        match self {
            Job::Plain(file, _) => file.path,
            Job::Zstd(_, path, _) => path,
        }
    }
}

/// Reads and checks everything.
///
/// # Errors
/// [`Error::Canceled`] only; whatever is wrong with the checkpoint is in the result.
pub fn verify(checkpoint: &Checkpoint, options: &Options) -> Result<Verification, Error> {
    let mut found = Verification { tensors: checkpoint.tensors.len(), ..Verification::default() };
    for tensor in checkpoint.tensors.values() {
        found.problems.extend(tensor.check_coverage(&checkpoint.sources).err());
    }
    let sources = SourceFiles::new(&Files::anywhere(), checkpoint);
    let files = files(checkpoint);
    let queue = Queue::new(checkpoint, &files, PieceSizes::of(options).usual as u64);
    options.progress.begin(queue.total());
    let read_bytes = AtomicU64::new(0);
    let problems = Mutex::new(BTreeMap::new());
    in_threads(options, |buffer: &mut Vec<u8>| {
        let Some(job) = queue.next() else { return Ok(false) };
        match read(&sources, &job, options, buffer) {
            Ok(()) => {
                read_bytes.fetch_add(job.len(), Ordering::Relaxed);
            }
            Err(Error::Canceled) => return Err(Error::Canceled),
            Err(error) => {
                // One problem per file is enough: the rest of a short file fails as well.
                lock(&problems).entry(job.path().clone()).or_insert(error);
            }
        }
        options.progress.advance(job.len());
        Ok(true)
    })?;
    found.problems.extend(unlocked(problems).into_values());
    found.problems.extend(sources.checks.problems());
    found.read_bytes = read_bytes.into_inner();
    found.checksums = sources.checks.complete();
    found.unprotected = unprotected(checkpoint, &files);
    Ok(found)
}

/// All files with plain sources.
fn files(checkpoint: &Checkpoint) -> Vec<PlainFile<'_>> {
    let mut files: BTreeMap<&PathBuf, PlainFile> = BTreeMap::new();
    for (number, source) in checkpoint.sources.iter().enumerate() {
        if let Source::File { path, len } = source {
            let file = files.entry(path).or_insert(PlainFile { path, sources: Vec::new(), len: 0 });
            file.sources.push(number);
            file.len = file.len.max(*len);
        }
    }
    files.into_values().collect()
}

/// Hands out what is to be read: compressed items first, then files in pieces.
struct Queue<'a> {
    zstd: Vec<(usize, &'a PathBuf, Range<u64>)>,
    next_zstd: AtomicUsize,
    files: &'a [PlainFile<'a>],
    pieces: Pieces,
}

impl<'a> Queue<'a> {
    fn new(checkpoint: &'a Checkpoint, files: &'a [PlainFile<'a>], piece_bytes: u64) -> Queue<'a> {
        let zstd = checkpoint.sources.iter().enumerate().filter_map(|(number, source)| match source {
            Source::Zstd { path, range, .. } => Some((number, path, range.clone())),
            Source::File { .. } => None,
        });
        let pieces = Pieces::new(files.iter().map(|file| (0..file.len, piece_bytes)));
        Queue { zstd: zstd.collect(), next_zstd: AtomicUsize::new(0), files, pieces }
    }

    fn total(&self) -> u64 {
        let zstd: u64 = self.zstd.iter().map(|(_, _, range)| range.end - range.start).sum();
        zstd + self.files.iter().map(|file| file.len).sum::<u64>()
    }

    fn next(&self) -> Option<Job<'a>> {
        if let Some((source, path, range)) = self.zstd.get(self.next_zstd.fetch_add(1, Ordering::Relaxed)) {
            return Some(Job::Zstd(*source, path, range.clone()));
        }
        let (number, range) = self.pieces.next()?;
        Some(Job::Plain(&self.files[number], range))
    }
}

fn read(sources: &SourceFiles, job: &Job, options: &Options, buffer: &mut Vec<u8>) -> Result<(), Error> {
    match job {
        Job::Plain(file, range) => {
            buffer.resize((range.end - range.start) as usize, 0);
            sources.read(file.sources[0], range.start, "", buffer)?;
            for &other in &file.sources[1..] {
                sources.checks.observe(other, range.start, buffer);
            }
            Ok(())
        }
        Job::Zstd(source, ..) => sources.decode(*source, 0, options, &mut |_, _| Ok(())),
    }
}

/// Bytes of each file that no checksum covers.
fn unprotected(checkpoint: &Checkpoint, files: &[PlainFile]) -> Vec<Unprotected> {
    let mut covered: BTreeMap<&PathBuf, Vec<Range<u64>>> = BTreeMap::new();
    for protection in &checkpoint.protections {
        match &checkpoint.sources[protection.source] {
            Source::File { path, .. } => covered.entry(path).or_default().push(protection.range.clone()),
            Source::Zstd { path, range, .. } => covered.entry(path).or_default().push(range.clone()),
        }
    }
    let mut lens: BTreeMap<&PathBuf, u64> = files.iter().map(|file| (file.path, file.len)).collect();
    for source in &checkpoint.sources {
        if let Source::Zstd { path, range, .. } = source {
            let len = lens.entry(path).or_default();
            *len = range.end.max(*len);
        }
    }
    let rest = lens.into_iter().map(|(path, len)| {
        let ranges = gaps(covered.remove(path).unwrap_or_default(), len);
        Unprotected { path: path.clone(), ranges }
    });
    rest.filter(|file| !file.ranges.is_empty()).collect()
}

/// What `covered` leaves of `0..len`.
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
