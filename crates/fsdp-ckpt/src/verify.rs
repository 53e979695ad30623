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
        Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use crate::{
    checkpoint::{Checkpoint, Source},
    error::{Error, TransferFault},
    file_io::Files,
    transfer::{Options, SourceFiles, decode, in_threads, piece_bytes},
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
    /// Per file, the bytes that no checksum covers, where there are any.
    pub unprotected: Vec<(PathBuf, u64)>,
    /// Everything that is wrong, each naming the file and the tensor or byte range.
    pub problems: Vec<Error>,
}

impl Verification {
    /// Whether nothing is wrong.
    pub fn is_sound(&self) -> bool {
        self.problems.is_empty()
    }

    /// Bytes of all files that no checksum covers.
    pub fn unprotected_bytes(&self) -> u64 {
        self.unprotected.iter().map(|(_, bytes)| bytes).sum()
    }
}

/// Something that one thread reads.
enum Job {
    /// Bytes of a file, for all sources that are this file.
    File { sources: Vec<usize>, range: Range<u64> },
    /// A compressed item.
    Zstd(usize),
}

/// Reads and checks everything.
///
/// # Errors
/// [`TransferFault::Canceled`] only; whatever is wrong with the checkpoint is in the result.
pub fn verify(checkpoint: &Checkpoint, options: &Options) -> Result<Verification, Error> {
    let mut found = Verification { tensors: checkpoint.tensors.len(), ..Verification::default() };
    for tensor in checkpoint.tensors.values() {
        found.problems.extend(tensor.check_coverage(&checkpoint.sources).err());
    }
    let sources = SourceFiles::new(&Files::disk(), checkpoint);
    let files = files(checkpoint);
    let jobs = jobs(checkpoint, &files, piece_bytes(options) as u64);
    options.progress.begin(jobs.iter().map(|job| job_bytes(checkpoint, job)).sum());
    let (next, read_bytes) = (AtomicUsize::new(0), AtomicU64::new(0));
    let problems = Mutex::new(BTreeMap::new());
    in_threads(options, |buffer: &mut Vec<u8>| {
        let number = next.fetch_add(1, Ordering::Relaxed);
        let Some(job) = jobs.get(number) else { return Ok(false) };
        match read(&sources, job, options, buffer) {
            Ok(()) => {
                read_bytes.fetch_add(job_bytes(checkpoint, job), Ordering::Relaxed);
            }
            Err(error @ Error::Transfer(TransferFault::Canceled)) => return Err(error),
            Err(error) => {
                // One problem per file is enough: the rest of a short file fails as well.
                let path = job_path(checkpoint, job).clone();
                let mut problems = problems.lock().unwrap_or_else(PoisonError::into_inner);
                problems.entry(path).or_insert(error);
            }
        }
        options.progress.advance(job_bytes(checkpoint, job));
        Ok(true)
    })?;
    found.problems.extend(problems.into_inner().unwrap_or_else(PoisonError::into_inner).into_values());
    found.problems.extend(sources.checks.faults().map(Error::from));
    found.read_bytes = read_bytes.into_inner();
    found.checksums = sources.checks.complete();
    found.unprotected = unprotected(checkpoint, &files);
    Ok(found)
}

/// The plain sources of each file, and its length.
fn files(checkpoint: &Checkpoint) -> BTreeMap<&PathBuf, (Vec<usize>, u64)> {
    let mut files: BTreeMap<&PathBuf, (Vec<usize>, u64)> = BTreeMap::new();
    for (number, source) in checkpoint.sources.iter().enumerate() {
        if let Source::File { path, len } = source {
            let (sources, file_len) = files.entry(path).or_default();
            sources.push(number);
            *file_len = (*file_len).max(*len);
        }
    }
    files
}

fn jobs(checkpoint: &Checkpoint, files: &BTreeMap<&PathBuf, (Vec<usize>, u64)>, piece: u64) -> Vec<Job> {
    let zstd = |source: &usize| matches!(checkpoint.sources[*source], Source::Zstd { .. });
    let mut jobs: Vec<Job> = (0..checkpoint.sources.len()).filter(zstd).map(Job::Zstd).collect();
    for (sources, len) in files.values() {
        for start in (0..*len).step_by(piece as usize) {
            jobs.push(Job::File { sources: sources.clone(), range: start..(start + piece).min(*len) });
        }
    }
    jobs
}

fn job_bytes(checkpoint: &Checkpoint, job: &Job) -> u64 {
    match job {
        Job::File { range, .. } => range.end - range.start,
        Job::Zstd(source) => match &checkpoint.sources[*source] {
            Source::Zstd { range, .. } => range.end - range.start,
            Source::File { .. } => unreachable!("only compressed sources are decoded"),
        },
    }
}

fn job_path<'a>(checkpoint: &'a Checkpoint, job: &Job) -> &'a PathBuf {
    match job {
        Job::File { sources, .. } => checkpoint.sources[sources[0]].path(),
        Job::Zstd(source) => checkpoint.sources[*source].path(),
    }
}

fn read(sources: &SourceFiles, job: &Job, options: &Options, buffer: &mut Vec<u8>) -> Result<(), Error> {
    match job {
        Job::File { sources: same, range } => {
            buffer.resize((range.end - range.start) as usize, 0);
            sources.read(same[0], range.start, "", buffer)?;
            for &other in &same[1..] {
                sources.checks.observe(other, range.start, buffer);
            }
            Ok(())
        }
        Job::Zstd(source) => {
            decode(sources, *source, 0, piece_bytes(options), options.cancel, &mut |_, _| Ok(())).map(drop)
        }
    }
}

/// Bytes of each file that no checksum covers.
fn unprotected(
    checkpoint: &Checkpoint,
    files: &BTreeMap<&PathBuf, (Vec<usize>, u64)>,
) -> Vec<(PathBuf, u64)> {
    let mut covered: BTreeMap<&PathBuf, Vec<Range<u64>>> = BTreeMap::new();
    for protection in &checkpoint.protections {
        match &checkpoint.sources[protection.source] {
            Source::File { path, .. } => covered.entry(path).or_default().push(protection.range.clone()),
            Source::Zstd { path, range, .. } => covered.entry(path).or_default().push(range.clone()),
        }
    }
    let mut lens: BTreeMap<&PathBuf, u64> = files.iter().map(|(path, (_, len))| (*path, *len)).collect();
    for source in &checkpoint.sources {
        if let Source::Zstd { path, range, .. } = source {
            let len = lens.entry(path).or_default();
            *len = range.end.max(*len);
        }
    }
    let rest = lens.into_iter().map(|(path, len)| {
        let mut ranges = covered.remove(path).unwrap_or_default();
        ranges.sort_by_key(|range| range.start);
        let mut end = 0;
        let mut protected = 0;
        for range in ranges {
            protected += range.end.saturating_sub(range.start.max(end));
            end = range.end.max(end);
        }
        (path.clone(), len.saturating_sub(protected))
    });
    rest.filter(|(_, bytes)| *bytes > 0).collect()
}

#[cfg(test)]
mod tests;
