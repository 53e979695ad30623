//! PyTorch's distributed checkpoints (DCP), as saved by torch 2.1 to 2.15.
//!
//! ```text
//! .metadata          a pickle: per tensor its shape, dtype and chunks (boxes); per chunk and value the file,
//!                    offset and length of its item
//! __0_0.distcp, ..   items one after another, in any order and with gaps: each an archive of torch.save
//! ```
//!
//! An item is found by its name and the first index of its chunk. The metadata also gives the position in the list of
//! chunks, but only as a hint, which is ignored. Chunks may come in any order, a rank may have several files, and items
//! may be zstd streams.
//!
//! Opening reads the metadata and the first and last pages of each item: the pickle with the tensor's layout, and the
//! directory of the archive. Both must agree with the metadata. Small records are compared with their checksums at
//! once; the checksums of tensor records become [protections](crate::checkpoint::Protection).
//!
//! A value that holds tensors (a tuple of tensors is saved this way) is nested further until each of its tensors has a
//! name.
//!
//! Ranks that saved without collectives (torch 2.9) wrote a `__{rank}.metadata` file each instead. Together these list
//! all chunks; if several ranks list the same item, the lowest rank's entry is used.
//!
//! This module does not prove that the chunks cover their tensors.

mod compressed;
mod items;
mod metadata;
mod plain;
mod storage;

use std::{collections::BTreeMap, path::Path};

use crate::{
    checkpoint::{Checkpoint, Key, Protection, Role, Source, Tensor, Value, flatten},
    error::{Error, Fault},
    file_io::{Files, PathFile},
    formats::{local::LocalTensor, optimizer::put_tensor, tree::add_value},
    pickle::{self, Graph, PICKLE_BYTES_MAX},
    torch::{Item, add_opaque},
};
use items::{Found, Job};
pub(super) use metadata::FLAT_NAMES;
use metadata::{Entry, Kind, Metadata};

/// The metadata file, which lists all items of the checkpoint.
pub const METADATA_FILE: &str = ".metadata";

/// Rank 0's metadata file after a save without collectives; with the other ranks' files it replaces [`METADATA_FILE`].
pub const FIRST_RANK_METADATA_FILE: &str = "__0.metadata";

/// Ending of the names of files that hold items.
pub(super) const ITEMS_ENDING: &str = ".distcp";

/// Whether a directory with these file names has item files but no metadata that lists their items.
pub(super) fn lacks_metadata(dir: &Path, names: &[String]) -> bool {
    names.iter().any(|name| name.ends_with(ITEMS_ENDING)) && !is_at(dir)
}

/// The error for a directory whose metadata is missing.
pub(super) fn no_metadata(dir: &Path) -> Error {
    let reason = format!(
        "its {METADATA_FILE} is missing, which describes its {ITEMS_ENDING} files (or \
         {FIRST_RANK_METADATA_FILE}, after a save without collectives); fetch it"
    );
    Error::malformed(dir, reason)
}

/// Whether a directory holds a DCP checkpoint, judged by its metadata files alone.
pub fn is_at(dir: &Path) -> bool {
    [METADATA_FILE, FIRST_RANK_METADATA_FILE].iter().any(|name| Files::anywhere().exists(&dir.join(name)))
}

/// Reads a checkpoint directory.
///
/// # Errors
/// Fails if the metadata is damaged or of another tool, a file is missing or too short, or an item does not match the
/// metadata. The error names the file and the tensor or value.
pub fn open(dir: &Path) -> Result<Checkpoint, Error> {
    let metadata = read_metadata(dir)?;
    let mut jobs: Vec<Job<'_>> = metadata.entries.iter().flat_map(items::jobs_of).collect();
    jobs.sort_by_key(|job| (job.location.file, job.location.range.start));
    let found = items::find_all(dir, &metadata.files, &jobs)?;
    let mut assembly = Assembly::new(dir, &metadata);
    for (job, found) in jobs.iter().zip(found) {
        assembly.add(job, found).map_err(|fault| fault.in_file(dir))?;
    }
    Ok(assembly.finish(&metadata))
}

/// Reads the metadata, merging the files of all ranks if there is one per rank.
fn read_metadata(dir: &Path) -> Result<Metadata, Error> {
    let read = |path: &Path| {
        let graph = parse(path)?;
        Metadata::read(&graph).map_err(|fault| fault.in_file(path))
    };
    let path = dir.join(METADATA_FILE);
    if Files::anywhere().exists(&path) || !is_at(dir) {
        return read(&path);
    }
    let mut ranks: Vec<u64> = Files::anywhere().list(dir)?.iter().filter_map(|name| rank_of(name)).collect();
    ranks.sort_unstable();
    let mut all = Metadata::default();
    for rank in ranks {
        let path = dir.join(format!("__{rank}.metadata"));
        all.merge(read(&path)?).map_err(|fault| fault.in_file(&path))?;
    }
    Ok(all)
}

/// The rank in the name of a rank's metadata file.
fn rank_of(name: &str) -> Option<u64> {
    name.strip_prefix("__")?.strip_suffix(".metadata")?.parse().ok()
}

fn parse(path: &Path) -> Result<Graph, Error> {
    let (file, len) = PathFile::open(path)?;
    // One byte more than the limit, so that the parser refuses a pickle that is too long.
    let bytes = file.read_first(len.min(PICKLE_BYTES_MAX as u64 + 1))?;
    let refused = |fault: Fault| fault.of_part("its pickle is refused: ", 0).in_file(path);
    let graph = pickle::parse(&bytes).map_err(refused)?;
    // Every object in the metadata must be understood, since the metadata describes everything else.
    match graph.first_unknown() {
        None => Ok(graph),
        Some(unknown) => match metadata::other_tool(&unknown.global) {
            Some(tool) => Err(metadata::of_other_tool(tool).in_file(path)),
            None => Err(refused(unknown.fault())),
        },
    }
}

/// A checkpoint under construction, assembled from its items.
struct Assembly {
    checkpoint: Checkpoint,
    /// Index of the source of each file that has uncompressed items.
    plain_sources: BTreeMap<usize, usize>,
    zstd_count: usize,
}

impl Assembly {
    fn new(dir: &Path, metadata: &Metadata) -> Assembly {
        let world_size = items::world_size(&metadata.files);
        let mut checkpoint = Checkpoint { path: dir.to_owned(), world_size, ..Checkpoint::default() };
        checkpoint.notes.clone_from(&metadata.notes);
        for entry in &metadata.entries {
            if let Kind::Tensor { dtype, shape, .. } = &entry.kind {
                let (path, shape, chunks) = (entry.path.clone(), shape.clone(), Vec::new());
                let tensor = Tensor { path, role: Role::Model, dtype: *dtype, shape, chunks };
                checkpoint.tensors.insert(entry.name.clone(), tensor);
            }
        }
        Assembly { checkpoint, plain_sources: BTreeMap::new(), zstd_count: 0 }
    }

    fn add(&mut self, job: &Job<'_>, found: Found) -> Result<(), Fault> {
        let source = self.source(job, &found);
        add_opaque(&found.item, &job.entry.path, &mut self.checkpoint.opaque);
        for (range, digest) in found.protections {
            let what = format!("tensor {}", job.name());
            self.checkpoint.protections.push(Protection { source, range, digest, what });
        }
        match (job.chunk, found.item) {
            (Some(chunk), Item::Tensor(tensor)) => {
                let owner = self.checkpoint.tensors.get_mut(&job.entry.name);
                let owner = owner.expect("every tensor of the metadata was made before");
                let stored = LocalTensor::of(&tensor, source);
                owner.chunks.push(stored.chunk_at(chunk.offsets.clone(), &owner.shape));
                Ok(())
            }
            (_, item) if item.holds_tensor() => self.add_nested(job.entry, source, item),
            (_, item) => add_value(&item, job.entry.path.clone(), Role::Other, &mut self.checkpoint),
        }
    }

    fn source(&mut self, job: &Job<'_>, found: &Found) -> usize {
        let sources = &mut self.checkpoint.sources;
        let next = sources.len();
        let path = found.path.to_path_buf();
        let Some(decoded_len_max) = found.decoded_len_max else {
            return *self.plain_sources.entry(job.location.file).or_insert_with(|| {
                sources.push(Source::File { path, len: found.file_len });
                next
            });
        };
        self.zstd_count += 1;
        sources.push(Source::Zstd { path, range: job.location.range.clone(), decoded_len_max });
        next
    }

    /// Adds the tensors and values inside a value, with names below its name.
    fn add_nested(&mut self, entry: &Entry, source: usize, item: Item) -> Result<(), Fault> {
        let (prefix, last) = match entry.path.split_last() {
            Some((last, prefix)) => (prefix, last.text()),
            None => (&[][..], entry.name.clone()),
        };
        let root = Item::Dict(vec![(Value::Str(last), item)]);
        let leaves = flatten(&root).map_err(|_| {
            let place = format!("the value `{}`", entry.name);
            metadata::unexpected(place, "a nested state dict whose tensors can be named")
        })?;
        for (inner, leaf) in leaves {
            let last = entry.path.last().into_iter().chain(&inner[1..]);
            let path: Vec<Key> = prefix.iter().chain(last).cloned().collect();
            match leaf {
                Item::Tensor(tensor) => {
                    let tensor = LocalTensor::of(tensor, source).to_tensor(path, Role::Model);
                    put_tensor(&mut self.checkpoint, tensor)?;
                }
                other => add_value(other, path, Role::Other, &mut self.checkpoint)?,
            }
        }
        Ok(())
    }

    fn finish(mut self, metadata: &Metadata) -> Checkpoint {
        let version = metadata.version.as_deref().unwrap_or("of torch before 2.9");
        let zstd = if self.zstd_count > 0 { ", zstd" } else { "" };
        self.checkpoint.format = format!("PyTorch DCP {version}{zstd}");
        self.checkpoint.assign_roles();
        self.checkpoint
    }
}

#[cfg(test)]
mod tests;
