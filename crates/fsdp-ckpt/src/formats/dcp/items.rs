//! Reads the structure of all items, without tensor data, on several threads.

use std::{
    num::NonZero,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

use super::{
    compressed,
    metadata::{ChunkEntry, Entry, Kind},
    plain,
    storage::{Location, item_name},
};
use crate::{
    bytes::Section,
    digest::{Digest, DigestKind},
    error::Error,
    file_io::PathFile,
    torch::{Item, TorchFile},
};

/// Number of threads that read items. More than the cores of a small machine, since they mostly wait for storage.
const THREADS: Range<usize> = 4..32;
/// Number of items that justify another thread.
const ITEMS_PER_THREAD: usize = 64;

/// An item to read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job<'a> {
    pub(super) entry: &'a Entry,
    /// The chunk; `None` for a value.
    pub(super) chunk: Option<&'a ChunkEntry>,
    pub(super) location: &'a Location,
}

/// The contents of an item.
pub(super) struct Found {
    pub(super) path: Arc<PathBuf>,
    pub(super) file_len: u64,
    pub(super) item: Item,
    /// Checksums of its storages, with their byte ranges.
    pub(super) protections: Vec<(Range<u64>, Digest)>,
    /// Maximum decoded length of the stream; `None` if the item is not compressed.
    pub(super) decoded_len_max: Option<u64>,
}

/// An open file of the checkpoint.
pub(super) struct ItemFile {
    pub(super) file: PathFile,
    pub(super) path: Arc<PathBuf>,
    pub(super) len: u64,
}

impl Job<'_> {
    /// The name of the item, for messages.
    pub(super) fn name(&self) -> String {
        item_name(&self.entry.name, self.chunk.map(|chunk| &chunk.offsets[..]))
    }

    /// Bytes of the tensor elements; `None` for a value.
    pub(super) fn data_len(&self) -> Option<u64> {
        let Kind::Tensor { dtype, .. } = &self.entry.kind else { return None };
        Some(self.chunk?.sizes.iter().product::<u64>() * dtype.size_bytes() as u64)
    }
}

/// The items of an entry: one per chunk of a tensor, or the value itself.
pub(super) fn jobs_of(entry: &Entry) -> Vec<Job<'_>> {
    match &entry.kind {
        Kind::Value(location) => vec![Job { entry, chunk: None, location }],
        Kind::Tensor { chunks, .. } => {
            let job = |chunk| Job { entry, chunk: Some(chunk), location: &chunk.location };
            chunks.iter().map(job).collect()
        }
    }
}

/// The number of ranks; `None` unless all files are named after ranks (`__{rank}_{number}.distcp`).
pub(super) fn world_size(files: &[String]) -> Option<usize> {
    let rank = |name: &String| {
        let (rank, number) = name.strip_prefix("__")?.strip_suffix(".distcp")?.split_once('_')?;
        number.parse::<u64>().ok()?;
        rank.parse::<usize>().ok()
    };
    files.iter().map(rank).try_fold(0, |size, rank| Some(size.max(rank?.checked_add(1)?))).filter(|&n| n > 0)
}

/// Reads the structure of all items. `jobs` should be sorted by file, so that each file is opened only a few times.
pub(super) fn find_all(dir: &Path, files: &[String], jobs: &[Job<'_>]) -> Result<Vec<Found>, Error> {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let threads = cores.clamp(THREADS.start, THREADS.end).min(jobs.len().div_ceil(ITEMS_PER_THREAD)).max(1);
    let per_thread = jobs.len().div_ceil(threads).max(1);
    thread::scope(|scope| {
        // Where the system has no more threads, this one looks.
        let spawn = |jobs| {
            let thread = thread::Builder::new().spawn_scoped(scope, move || find_run(dir, files, jobs));
            thread.map_err(|_| jobs)
        };
        let handles: Vec<_> = jobs.chunks(per_thread).map(spawn).collect();
        let mut found = Vec::with_capacity(jobs.len());
        for handle in handles {
            let run = |jobs| find_run(dir, files, jobs);
            let join =
                |thread: thread::ScopedJoinHandle<'_, _>| thread.join().expect("looking does not panic");
            found.extend(handle.map_or_else(run, join)?);
        }
        Ok(found)
    })
}

fn find_run(dir: &Path, files: &[String], jobs: &[Job<'_>]) -> Result<Vec<Found>, Error> {
    let mut open: Option<(usize, ItemFile)> = None;
    let mut found = Vec::with_capacity(jobs.len());
    for job in jobs {
        let number = job.location.file;
        let (_, file) = match open.take() {
            Some(open_file) if open_file.0 == number => open.insert(open_file),
            _ => open.insert((number, open_file(dir, &files[number], job)?)),
        };
        found.push(find(file, job)?);
    }
    Ok(found)
}

fn open_file(dir: &Path, name: &str, job: &Job<'_>) -> Result<ItemFile, Error> {
    let path = dir.join(name);
    match PathFile::open(&path) {
        Ok((file, len)) => Ok(ItemFile { file, path: Arc::new(path), len }),
        Err(error) if error.is_not_found() => {
            let reason = format!("it is missing: it should hold {}; fetch the checkpoint again", job.name());
            Err(Error::malformed(path, reason))
        }
        Err(other) => Err(other),
    }
}

fn find(file: &ItemFile, job: &Job<'_>) -> Result<Found, Error> {
    let range = job.location.range.clone();
    if range.end > file.len {
        let reason = format!(
            "{} should be bytes {}..{} of it, but it has only {}; it was truncated, or belongs to another save",
            job.name(),
            range.start,
            range.end,
            file.len
        );
        return Err(Error::malformed(&*file.path, reason));
    }
    let found = if job.location.is_zstd { compressed::find(file, job)? } else { plain::find(file, job)? };
    check_tensor(file, job, &found.item)?;
    Ok(found)
}

/// Checks that the item of a chunk is a tensor of the chunk's dtype and shape.
fn check_tensor(file: &ItemFile, job: &Job<'_>, item: &Item) -> Result<(), Error> {
    let (Some(chunk), Kind::Tensor { dtype, .. }) = (job.chunk, &job.entry.kind) else { return Ok(()) };
    let found = match item {
        Item::Tensor(tensor) if tensor.dtype == *dtype && tensor.shape == chunk.sizes => return Ok(()),
        Item::Tensor(tensor) => format!("one of {} {:?}", tensor.dtype, tensor.shape),
        _ => "something else".to_owned(),
    };
    let (item, sizes) = (job.name(), &chunk.sizes);
    let reason = format!(
        "{item} should be a tensor of {dtype} {sizes:?} and is {found}; the file belongs to another save"
    );
    Err(Error::malformed(&*file.path, reason))
}

/// Compares the small records of an archive with their checksums. Returns the checksums of the storages.
pub(super) fn check_records(
    section: Section<'_>,
    torch: &TorchFile,
    path: &Path,
) -> Result<Vec<(Range<u64>, Digest)>, Error> {
    let mut of_storages = Vec::new();
    for (name, record) in torch.archive.records() {
        let Some(crc) = record.crc32 else { continue };
        let expected = Digest { kind: DigestKind::Crc32, value: u64::from(crc) };
        let is_storage = name.split_once('/').is_some_and(|(_, name)| name.starts_with("data/"));
        if is_storage {
            of_storages.push((record.data.clone(), expected));
            continue;
        }
        let bytes = section.read(record.data.start - section.start()..record.data.end - section.start())?;
        if DigestKind::Crc32.of(&bytes) != expected {
            let item = section.item();
            let reason = format!("record `{name}` of {item} does not match its CRC-32; fetch the file again");
            return Err(Error::malformed(path, reason));
        }
    }
    Ok(of_storages)
}
