//! PyTorch's distributed checkpoints (DCP), as torch 2.1 to 2.15 save them.
//!
//! ```text
//! .metadata          a pickle: per tensor its shape, dtype and chunks (boxes); per chunk and value the file,
//!                    offset and length of its item
//! __0_0.distcp, ..   items one after another, in any order and with gaps: each an archive of torch.save
//! ```
//!
//! An item is found by name and first index of its chunk; the position in the list of chunks, which the
//! metadata gives too, is only a hint there and is ignored. Chunks may come in any order, and several files may
//! belong to a rank. Items may be zstd streams.
//!
//! Opening reads the metadata, and of each item the first and last pages: the pickle that says how the tensor
//! lies, and the directory of its archive. What they say must agree with the metadata. Small records are compared
//! with their checksums at once; those of tensors become [protections](crate::checkpoint::Protection).
//!
//! Values that hold tensors (tuples of them are saved so) are nested further, until their tensors have names.
//!
//! Ranks that saved without collectives (torch 2.9) wrote a `__{rank}.metadata` each instead. Together they list
//! all chunks; of what several ranks list, the first one's counts.
//!
//! Whether chunks cover their tensors is not proven here.

mod compressed;
mod items;
mod metadata;
mod plain;
mod storage;

use std::{collections::BTreeMap, path::Path};

use crate::{
    checkpoint::{Checkpoint, Global, Key, Object, Protection, Role, Source, Tensor, Value, flatten, join},
    error::{Error, Fault},
    file_io::{Files, PathFile},
    formats::local::LocalTensor,
    pickle::{self, Graph, PICKLE_BYTES_MAX},
    torch::{Item, add_opaque},
};
use items::{Found, Job};
use metadata::{Entry, Kind, Metadata};

/// The file that lists all others.
pub const METADATA_FILE: &str = ".metadata";

/// The file that takes its place, together with those of the other ranks, after a save without collectives.
pub const FIRST_RANK_METADATA_FILE: &str = "__0.metadata";

/// How the names of files with items end.
pub(super) const ITEMS_ENDING: &str = ".distcp";

/// Whether a directory with these names has files of items, and nothing that lists them.
pub(super) fn lacks_metadata(dir: &Path, names: &[String]) -> bool {
    names.iter().any(|name| name.ends_with(ITEMS_ENDING)) && !is_at(dir)
}

/// The error of such a directory.
pub(super) fn no_metadata(dir: &Path) -> Error {
    let reason = format!(
        "its {METADATA_FILE} is missing, which says what the {ITEMS_ENDING} files in it hold (or {FIRST_RANK_METADATA_FILE}, \
         after a save without collectives); fetch it"
    );
    Error::malformed(dir, reason)
}

/// Whether there is such a checkpoint, judged by its metadata files alone.
pub fn is_at(dir: &Path) -> bool {
    [METADATA_FILE, FIRST_RANK_METADATA_FILE].iter().any(|name| Files::anywhere().exists(&dir.join(name)))
}

/// Reads a checkpoint directory.
///
/// # Errors
/// When the metadata is damaged or of another tool, a file is missing or too short, or an item is not what the
/// metadata says. The error names the file and the tensor or value.
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

/// The metadata of all ranks.
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

/// The rank whose own metadata a file of this name is.
fn rank_of(name: &str) -> Option<u64> {
    name.strip_prefix("__")?.strip_suffix(".metadata")?.parse().ok()
}

fn parse(path: &Path) -> Result<Graph, Error> {
    let (file, len) = PathFile::open(path)?;
    // A longer pickle is refused when its length is looked at.
    let bytes = file.read_first(len.min(PICKLE_BYTES_MAX as u64 + 1))?;
    let refused = |fault: Fault| fault.of_part("its pickle is refused: ", 0).in_file(path);
    let graph = pickle::parse(&bytes).map_err(refused)?;
    // All of the metadata must be understood: it says what the rest is.
    match graph.first_unknown() {
        None => Ok(graph),
        Some(unknown) => match other_tool(&unknown.global) {
            Some(tool) => Err(of_other_tool(tool).in_file(path)),
            None => Err(refused(unknown.fault())),
        },
    }
}

/// Tools whose directories look like PyTorch's, by the modules that their metadata names.
fn other_tool(unknown: &Global) -> Option<&'static str> {
    match unknown.module.split('.').next() {
        Some("megatron") => Some(metadata::MEGATRON),
        Some("bytecheckpoint") => Some("ByteCheckpoint"),
        _ => None,
    }
}

/// The checkpoint of another tool that resembles PyTorch's.
fn of_other_tool(tool: &str) -> Fault {
    let looks = "which only looks like one of PyTorch";
    Fault::unsupported(format!("it is a checkpoint of {tool}, {looks}; convert it with {tool} first"))
}

/// A checkpoint that is put together from what the items hold.
struct Assembly {
    checkpoint: Checkpoint,
    /// The source of each file that has items in plain form.
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
            (_, item) => self.add_value(job.entry.path.clone(), item.to_value()),
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

    /// Adds the tensors and values in a value, with names below its own.
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
                    let name = self.free_name(&path)?;
                    self.checkpoint
                        .tensors
                        .insert(name, LocalTensor::of(tensor, source).to_tensor(path, Role::Model));
                }
                other => self.add_value(path, other.to_value())?,
            }
        }
        Ok(())
    }

    fn add_value(&mut self, path: Vec<Key>, value: Value) -> Result<(), Fault> {
        let name = self.free_name(&path)?;
        self.checkpoint.values.insert(name, Object { path, role: Role::Other, value });
        Ok(())
    }

    fn free_name(&self, path: &[Key]) -> Result<String, Fault> {
        let name = join(path);
        if self.checkpoint.tensors.contains_key(&name) || self.checkpoint.values.contains_key(&name) {
            return Err(Fault::new(format!("two tensors or values have the name `{name}`")));
        }
        Ok(name)
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
