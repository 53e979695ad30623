//! safetensors: one file, the files of a Hugging Face model, or the shards that ranks saved.
//!
//! PyTorch's `HuggingFaceStorageWriter` (2.8 and later) writes shards: one file per rank, whose metadata gives the
//! index in the whole tensor at which each of its tensors begins (`DCP_SHARDING_INFO`). Whole shapes are not stored;
//! they are inferred from the ends of the shards, so missing files of the *last* ranks go unnoticed. All other losses
//! are found: PyTorch saves each piece once and writes a file for each rank that has a piece, so a piece in two files
//! means that one file is a copy in the place of another, and a gap in the ranks means that files were lost.

use std::{collections::BTreeMap, path::Path};

use serde::Deserialize;

use crate::{
    checkpoint::{Checkpoint, Chunk, Key, Region, Role, Source, Tensor, len_bytes},
    error::Error,
    file_io::{Files, directory_of},
    formats::rank_fault::{part_of_directory, several_files},
    model_files::{ModelReader, index::in_two_files},
    native::{MANIFEST_FILE, SHARD_MARK},
    safetensors::{SafetensorsReader, TensorEntry},
};

/// The metadata key under which a file records where its tensors begin.
const SHARDING_INFO: &str = "DCP_SHARDING_INFO";

/// Reads one file, as a whole model or as the only shard of a model.
///
/// # Errors
/// [`Error::Malformed`], [`Error::WrongPath`] for a part of a native checkpoint, [`Error::Io`].
pub fn open_file(path: &Path) -> Result<Checkpoint, Error> {
    let reader = SafetensorsReader::open(path)?;
    refuse_native(&reader)?;
    if is_shard(&reader) {
        from_shards(path, vec![reader])
    } else {
        from_files(path, "safetensors file", &[reader])
    }
}

/// Reads a model through its index.
///
/// # Errors
/// Those of [`ModelReader::open`].
pub fn open_index(path: &Path) -> Result<Checkpoint, Error> {
    let model = ModelReader::open(path)?;
    from_files(path, "safetensors with an index", model.files())
}

/// The checkpoint in the files of an open model.
///
/// # Errors
/// [`Error::Malformed`] for a tensor that two files hold.
pub(crate) fn from_model(model: &ModelReader) -> Result<Checkpoint, Error> {
    from_files(model.path(), "safetensors", model.files())
}

/// Reads the files of a directory that belong together: shards of ranks, or a model whose index is missing.
///
/// # Errors
/// [`Error::Malformed`], [`Error::WrongPath`] for files that do not belong together, [`Error::Io`].
pub fn open_files(dir: &Path, names: &[String]) -> Result<Checkpoint, Error> {
    let readers = names.iter().map(|name| SafetensorsReader::open(dir.join(name)));
    let readers = readers.collect::<Result<Vec<_>, _>>()?;
    readers.iter().try_for_each(refuse_native)?;
    if readers.iter().all(is_shard) {
        return from_shards(dir, readers);
    }
    if names.len() > 1 {
        let count = common_count(names).ok_or_else(|| several_files(dir, names))?;
        if count != names.len() {
            let missing = count.abs_diff(names.len());
            let reason = format!(
                "{missing} of the {count} files that its name states are missing; fetch or save them again"
            );
            return Err(Error::malformed(dir, reason));
        }
    }
    let mut checkpoint = from_files(dir, "safetensors", &readers)?;
    if names.len() > 1 {
        checkpoint.notes.push("there is no index; files were joined by their names".to_owned());
    }
    Ok(checkpoint)
}

/// The file count that all of these names contain (`model-00001-of-00003.safetensors`); `None` if they do not agree.
fn common_count(names: &[String]) -> Option<usize> {
    let count = |name: &String| {
        let (stem, rest) = name.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
        Some((stem.rsplit_once('-')?.0.to_owned(), rest.parse::<usize>().ok()?))
    };
    let first = count(names.first()?)?;
    names.iter().all(|name| count(name).as_ref() == Some(&first)).then_some(first.1)
}

fn is_shard(reader: &SafetensorsReader) -> bool {
    reader.header().metadata().is_some_and(|metadata| metadata.contains_key(SHARDING_INFO))
}

/// Refuses shards of a native checkpoint, which must be read through its manifest.
fn refuse_native(reader: &SafetensorsReader) -> Result<(), Error> {
    if !reader.header().metadata().is_some_and(|metadata| metadata.contains_key(SHARD_MARK)) {
        return Ok(());
    }
    let directory = directory_of(reader.path());
    if Files::anywhere().link_exists(&directory.join(MANIFEST_FILE)) {
        return Err(part_of_directory(reader.path(), &directory));
    }
    let reason = format!(
        "it is part of a native checkpoint whose {MANIFEST_FILE} is missing: the save was not completed, or \
         the file was lost; without it the tensors cannot be known to be whole"
    );
    Err(Error::malformed(reader.path(), reason))
}

fn shape_of(entry: &TensorEntry) -> Vec<u64> {
    entry.shape().iter().map(|&size| size as u64).collect()
}

fn empty(path: &Path, format: &str) -> Checkpoint {
    Checkpoint { path: path.to_owned(), format: format.to_owned(), ..Checkpoint::default() }
}

fn source_of(reader: &SafetensorsReader) -> Source {
    Source::File { path: reader.path().to_owned(), len: reader.header().file_len() }
}

/// Makes a checkpoint of files that hold whole tensors.
fn from_files(path: &Path, format: &str, readers: &[SafetensorsReader]) -> Result<Checkpoint, Error> {
    let mut checkpoint = empty(path, format);
    for (source, reader) in readers.iter().enumerate() {
        checkpoint.sources.push(source_of(reader));
        for entry in reader.header().entries() {
            let shape = shape_of(entry);
            let offset = reader.header().data_start() + entry.data_range().start;
            let chunks = vec![Chunk { region: Region::Flat(0..shape.iter().product()), source, offset }];
            let path = vec![Key::Name(entry.name().to_owned())];
            let tensor = Tensor { path, role: Role::Model, dtype: entry.dtype(), shape, chunks };
            if let Some(first) = checkpoint.tensors.insert(entry.name().to_owned(), tensor) {
                let first = checkpoint.sources[first.chunks[0].source].path();
                return Err(in_two_files(entry.name(), first, reader.path()));
            }
        }
    }
    checkpoint.assign_roles();
    Ok(checkpoint)
}

/// Where a tensor of a file begins in the whole tensor.
#[derive(Deserialize)]
struct ShardInfo {
    saved_offsets: Vec<u64>,
}

/// Makes a checkpoint of the shards that ranks saved.
fn from_shards(path: &Path, readers: Vec<SafetensorsReader>) -> Result<Checkpoint, Error> {
    let mut checkpoint = empty(path, "safetensors shards (PyTorch DCP, HuggingFaceStorageWriter)");
    for (source, reader) in readers.iter().enumerate() {
        checkpoint.sources.push(source_of(reader));
        let offsets_of = offsets(reader)?;
        for entry in reader.header().entries() {
            let (name, sizes) = (entry.name(), shape_of(entry));
            let offsets = offsets_of.get(name).map(|info| info.saved_offsets.clone());
            let no_offsets = || no_offsets(reader.path(), name, &sizes);
            let offsets = offsets.filter(|offsets| offsets.len() == sizes.len()).ok_or_else(no_offsets)?;
            let ends = offsets.iter().zip(&sizes).map(|(offset, size)| offset.checked_add(*size));
            let ends = ends.collect::<Option<Vec<u64>>>().ok_or_else(no_offsets)?;
            let tensor = checkpoint.tensors.entry(name.to_owned()).or_insert_with(|| Tensor {
                path: vec![Key::Name(name.to_owned())],
                role: Role::Model,
                dtype: entry.dtype(),
                shape: vec![0; sizes.len()],
                chunks: Vec::new(),
            });
            if tensor.dtype != entry.dtype() || tensor.shape.len() != sizes.len() {
                let other = tensor.chunks.first().map_or(source, |chunk| chunk.source);
                let other = checkpoint.sources[other].path().display();
                let reason = format!(
                    "its shard of tensor `{name}` differs in type or dimensions from the one in {other}"
                );
                return Err(Error::malformed(reader.path(), reason));
            }
            tensor.shape.iter_mut().zip(ends).for_each(|(size, end)| *size = end.max(*size));
            let region = Region::packed(offsets, sizes);
            if let Some(twin) = tensor.chunks.iter().find(|chunk| chunk.region == region) {
                let twin = checkpoint.sources[twin.source].path();
                return Err(in_two_shards(name, twin, reader.path()));
            }
            let offset = reader.header().data_start() + entry.data_range().start;
            tensor.chunks.push(Chunk { region, source, offset });
        }
    }
    checkpoint.world_size = Some(check_ranks(path, &readers)?);
    let last_ranks =
        "missing files of the last ranks: neither whole shapes nor the number of ranks are stored";
    checkpoint.limits.push(last_ranks.to_owned());
    check_sizes(&checkpoint)?;
    checkpoint.assign_roles();
    Ok(checkpoint)
}

fn offsets(reader: &SafetensorsReader) -> Result<BTreeMap<String, ShardInfo>, Error> {
    let metadata = reader.header().metadata().and_then(|metadata| metadata.get(SHARDING_INFO));
    let text = metadata.expect("only files with sharding information are read as shards");
    serde_json::from_str(text).map_err(|error| {
        Error::malformed(reader.path(), format!("its {SHARDING_INFO} cannot be read: {error}"))
    })
}

/// The error for a tensor that the sharding information does not list, or lists with offsets that do not fit its shape.
fn no_offsets(path: &Path, tensor: &str, shape: &[u64]) -> Error {
    let reason =
        format!("its {SHARDING_INFO} gives no offsets that fit tensor `{tensor}` of shape {shape:?}");
    Error::malformed(path, reason)
}

/// The error for a piece of a tensor that two files hold.
fn in_two_shards(tensor: &str, first: &Path, second: &Path) -> Error {
    let reason = format!(
        "it holds the same piece of tensor `{tensor}` as {}; every piece is saved once, so one of the files was copied over \
         the other: fetch or save them again",
        first.display()
    );
    Error::malformed(second, reason)
}

/// Derives the number of ranks from the file names, and checks that no rank before the last one lacks a file.
fn check_ranks(path: &Path, readers: &[SafetensorsReader]) -> Result<usize, Error> {
    let rank = |reader: &SafetensorsReader| {
        let name = reader.path().file_name()?.to_str()?.strip_prefix("shard-")?;
        name.split('-').next()?.parse::<usize>().ok()
    };
    let ranks: std::collections::BTreeSet<usize> = readers.iter().filter_map(rank).collect();
    let count = ranks.last().copied().unwrap_or(readers.len()).max(1);
    let missing: Vec<String> = if count - ranks.len().min(count) < 1000 && !ranks.is_empty() {
        (1..=count).filter(|rank| !ranks.contains(rank)).map(|rank| (rank - 1).to_string()).collect()
    } else {
        Vec::new()
    };
    if !missing.is_empty() {
        let ranks = missing.join(", ");
        let reason = format!(
            "there is no file of rank {ranks}, but there is one of rank {}: what it held is missing; fetch or save it again",
            count - 1
        );
        return Err(Error::malformed(path, reason));
    }
    Ok(count)
}

/// Checks that the byte lengths of whole tensors, whose shapes are inferred from offsets, do not overflow.
fn check_sizes(checkpoint: &Checkpoint) -> Result<(), Error> {
    for (name, tensor) in &checkpoint.tensors {
        if len_bytes(&tensor.shape, tensor.dtype.size_bytes()).is_none() {
            let path = checkpoint.sources[tensor.chunks[0].source].path();
            return Err(no_offsets(path, name, &tensor.shape));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
