//! The layout of an export: the file and offset of each tensor, as a pure function of names, dtypes, shapes and limit.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use serde_json::json;

use crate::{
    digest::{Digest, DigestKind},
    error::{Error, Fault},
    file_io::{directory_of, file_name},
    model_files::{INDEX_FILE, SINGLE_FILE},
    safetensors::{Header, Metadata, TensorEntry, TensorSpec},
};

/// The layout of an export. Cheap to clone, so each writer thread can have its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportPlan {
    shared: Arc<Shared>,
}

#[derive(Debug, PartialEq, Eq)]
struct Shared {
    dir: PathBuf,
    files: Vec<PlannedFile>,
    index: Option<PlannedIndex>,
    /// The file of each tensor, as an index in `files`.
    file_of: BTreeMap<String, usize>,
    digest: Digest,
}

/// One safetensors file of an export.
#[derive(Debug, PartialEq, Eq)]
pub struct PlannedFile {
    pub(super) path: PathBuf,
    pub(super) temporary: PathBuf,
    pub(super) header: Header,
    pub(super) prefix: Vec<u8>,
}

/// The index of a sharded export.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PlannedIndex {
    pub(crate) path: PathBuf,
    pub(super) temporary: PathBuf,
    pub(crate) text: Vec<u8>,
}

impl PlannedFile {
    /// The final path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The layout of the file.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The bytes before the data.
    pub(crate) fn prefix(&self) -> &[u8] {
        &self.prefix
    }

    fn new(path: PathBuf, tensors: Vec<TensorSpec>, metadata: Metadata) -> Result<PlannedFile, Error> {
        let mut temporary = file_name(&path)?.to_owned();
        temporary.push(".tmp");
        let temporary = path.with_file_name(temporary);
        match Header::layout(sorted(tensors), Some(metadata)) {
            Ok((header, prefix)) => Ok(PlannedFile { path, temporary, header, prefix }),
            Err(fault) => Err(cannot_lay_out(&path, &fault)),
        }
    }
}

impl ExportPlan {
    /// Plans a single file. Tensors are in the order of Hugging Face's writer, whatever their given order: wider element
    /// types come first, so that every tensor is aligned to its elements, then tensors are sorted by name. Adds `format: pt` to the metadata, without which some readers refuse a file,
    /// unless a `format` is given.
    ///
    /// # Errors
    /// [`Error::WrongPath`] for a path without a file name; [`Error::BadRequest`] for repeated names, a tensor named
    /// `__metadata__`, or sizes beyond the limits of the format.
    pub fn new(
        path: impl Into<PathBuf>,
        tensors: Vec<TensorSpec>,
        metadata: Metadata,
    ) -> Result<ExportPlan, Error> {
        let file = PlannedFile::new(path.into(), tensors, with_format(metadata))?;
        let dir = directory_of(&file.path);
        let file_of = file.header.entries().iter().map(|entry| (entry.name().to_owned(), 0)).collect();
        Ok(ExportPlan::of(dir, vec![file], None, file_of))
    }

    /// Plans a model in a directory, in files with at most `shard_bytes_max` bytes of tensors each, cut and named as by
    /// Hugging Face: `model.safetensors` if one file suffices, otherwise `model-00001-of-00003.safetensors` and so on
    /// with `model.safetensors.index.json`. A larger tensor gets its own file.
    ///
    /// # Errors
    /// [`Error::BadRequest`], as for [`ExportPlan::new`].
    pub fn sharded(
        dir: impl Into<PathBuf>,
        tensors: Vec<TensorSpec>,
        metadata: Metadata,
        shard_bytes_max: u64,
    ) -> Result<ExportPlan, Error> {
        let (dir, metadata) = (dir.into(), with_format(metadata));
        // Lays out all tensors in one file, to check names and sizes and to get the size of each tensor.
        let whole = Header::layout(tensors.clone(), None);
        let (whole, _) = whole.map_err(|fault| cannot_lay_out(&dir.join(SINGLE_FILE), &fault))?;
        let sizes: Vec<u64> = whole.entries().iter().map(TensorEntry::len_bytes).collect();
        let shards = cut(&sizes, shard_bytes_max);
        if shards.len() <= 1 {
            return ExportPlan::new(dir.join(SINGLE_FILE), tensors, metadata);
        }
        let mut files = Vec::with_capacity(shards.len());
        let mut file_of = BTreeMap::new();
        for (number, shard) in shards.iter().enumerate() {
            let path = dir.join(format!("model-{:05}-of-{:05}.safetensors", number + 1, shards.len()));
            file_of.extend(shard.iter().map(|&tensor| (tensors[tensor].name.clone(), number)));
            let tensors = shard.iter().map(|&tensor| tensors[tensor].clone()).collect();
            files.push(PlannedFile::new(path, tensors, metadata.clone())?);
        }
        let index = Some(index_of(&dir, &whole, &files, &file_of));
        Ok(ExportPlan::of(dir, files, index, file_of))
    }

    fn of(
        dir: PathBuf,
        files: Vec<PlannedFile>,
        index: Option<PlannedIndex>,
        file_of: BTreeMap<String, usize>,
    ) -> ExportPlan {
        let heads = files.iter().map(|file| (&file.path, &file.prefix));
        let heads = heads.chain(index.iter().map(|index| (&index.path, &index.text)));
        let text: Vec<u8> = heads
            .flat_map(|(path, head)| [path.as_os_str().as_encoded_bytes(), head])
            .flat_map(|bytes| [&(bytes.len() as u64).to_le_bytes(), bytes].concat())
            .collect();
        let digest = DigestKind::Crc64.of(&text);
        ExportPlan { shared: Arc::new(Shared { dir, files, index, file_of, digest }) }
    }

    /// Identifies the plan: a checksum of its paths and headers.
    pub(super) fn digest(&self) -> Digest {
        self.shared.digest
    }

    /// The files, in the order of their numbers.
    pub fn files(&self) -> &[PlannedFile] {
        &self.shared.files
    }

    /// The path of the single file, or of the index of a sharded model.
    pub fn path(&self) -> &Path {
        self.index().map_or_else(|| self.files()[0].path(), |index| &index.path)
    }

    /// The entry of a tensor in the header of its file.
    ///
    /// # Errors
    /// [`Error::BadRequest`] if the plan has no such tensor.
    pub fn entry(&self, name: &str) -> Result<&TensorEntry, Error> {
        let (file, tensor) = self.locate(name)?;
        Ok(&self.files()[file].header.entries()[tensor])
    }

    /// The indices of the tensor's file, and of the tensor in the file.
    pub(super) fn locate(&self, name: &str) -> Result<(usize, usize), Error> {
        let file = self.shared.file_of.get(name).copied();
        let tensor = file.and_then(|file| Some((file, self.files()[file].header.position(name)?)));
        tensor.ok_or_else(|| Error::unknown_tensor(self.path(), name, self.shared.file_of.len()))
    }

    pub(super) fn dir(&self) -> &Path {
        &self.shared.dir
    }

    pub(crate) fn index(&self) -> Option<&PlannedIndex> {
        self.shared.index.as_ref()
    }
}

/// Cuts tensors of these sizes into shards of at most `max` bytes, in order. A tensor above `max` becomes its own shard
/// and does not close the current one.
fn cut(sizes: &[u64], max: u64) -> Vec<Vec<usize>> {
    let mut shards = Vec::new();
    let (mut current, mut filled) = (Vec::new(), 0);
    for (tensor, &size) in sizes.iter().enumerate() {
        if size > max {
            shards.push(vec![tensor]);
            continue;
        }
        if filled + size > max {
            shards.push(std::mem::take(&mut current));
            filled = 0;
        }
        current.push(tensor);
        filled += size;
    }
    if !current.is_empty() {
        shards.push(current);
    }
    shards
}

/// Sorts wider elements first, then by name. With 8-byte aligned data, every tensor is then aligned.
fn sorted(mut tensors: Vec<TensorSpec>) -> Vec<TensorSpec> {
    tensors.sort_by(|a, b| b.dtype.alignment().cmp(&a.dtype.alignment()).then_with(|| a.name.cmp(&b.name)));
    tensors
}

fn with_format(mut metadata: Metadata) -> Metadata {
    metadata.entry("format".to_owned()).or_insert_with(|| "pt".to_owned());
    metadata
}

/// The error for tensors that no safetensors file can hold.
pub(crate) fn cannot_lay_out(path: &Path, fault: &Fault) -> Error {
    Error::bad_request(path, format!("it cannot be laid out: {fault}"))
}

fn index_of(
    dir: &Path,
    whole: &Header,
    files: &[PlannedFile],
    file_of: &BTreeMap<String, usize>,
) -> PlannedIndex {
    let file_name = |file: usize| {
        let name = files[file].path.file_name().expect("planned files have names");
        name.to_string_lossy().into_owned()
    };
    let weight_map: BTreeMap<_, _> =
        file_of.iter().map(|(tensor, &file)| (tensor.as_str(), file_name(file))).collect();
    let text = json!({ "metadata": { "total_size": whole.data_len() }, "weight_map": weight_map });
    let mut text = serde_json::to_vec_pretty(&text).expect("strings and integers always serialize");
    text.push(b'\n');
    PlannedIndex { path: dir.join(INDEX_FILE), temporary: dir.join(format!("{INDEX_FILE}.tmp")), text }
}

#[cfg(test)]
mod tests;
