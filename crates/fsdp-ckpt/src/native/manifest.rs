//! The manifest of a native checkpoint: its content, the location and checksums of its data, and the state of the run.
//!
//! This module does no I/O: bytes in, values out. Parsing proves everything that can be proved without the other files:
//! that every row of every tensor is in exactly one of them, and that each chunk has a checksum. The text format is in
//! `text`, the digest of the text in `seal`.

mod text;

use std::{collections::BTreeMap, ops::Range};

pub(super) use text::tensor_text;

use super::{attempt::plain_name, plan::row_count, seal};
use crate::{
    checkpoint::{Key, Object, Role},
    digest::{Digest, DigestKind},
    error::Fault,
    file_io::is_plain_name,
    ranges::{first_coverage_fault, wide},
    safetensors::{TensorEntry, TensorSpec, TensorType, row_bytes},
};

/// Name of the manifest in the directory of a checkpoint.
pub const MANIFEST_FILE: &str = "manifest.json";

/// The content of a native checkpoint.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Manifest {
    /// Number of ranks that saved it.
    pub world_size: usize,
    /// The tensors by name.
    pub tensors: BTreeMap<String, ManifestTensor>,
    /// The files and the parts of tensors in them, rank 0 first.
    pub files: Vec<ManifestFile>,
    /// Values that are not tensors, by name; only converted checkpoints have any.
    pub values: BTreeMap<String, Object>,
    /// The state of the run, as passed to the save.
    pub run_state: serde_json::Map<String, serde_json::Value>,
}

/// A whole tensor, independent of its sharding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestTensor {
    /// Element type.
    pub dtype: TensorType,
    /// Dimensions, slowest first.
    pub shape: Vec<usize>,
    /// Path in a nested state dict.
    pub path: Vec<Key>,
    /// Role in training.
    pub role: Role,
}

/// A file of the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestFile {
    /// Name relative to the directory; in object stores it has the attempt and a slash as a prefix.
    pub name: String,
    /// Length in bytes.
    pub len: u64,
    /// Number of bytes before the data.
    pub data_start: u64,
    /// Digest of the bytes before the data.
    pub header: Digest,
    /// The rows in the file.
    pub shards: Vec<ManifestShard>,
}

/// Rows of a tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestShard {
    /// Name of the tensor.
    pub tensor: String,
    /// The range of rows, counted in the whole tensor.
    pub rows: Range<usize>,
    /// Rows per chunk; the last chunk may have fewer.
    pub chunk_rows: usize,
    /// The CRC-64 of each chunk.
    pub chunks: Vec<u64>,
}

impl ManifestTensor {
    /// Number of rows; a 0-d tensor has one.
    pub fn row_count(&self) -> usize {
        row_count(&self.shape)
    }

    /// Bytes per row.
    pub fn row_bytes(&self) -> u64 {
        row_bytes(&self.shape, self.dtype)
    }
}

impl ManifestShard {
    /// Returns the tensor that the file must contain under this name.
    pub fn spec(&self, tensor: &ManifestTensor) -> TensorSpec {
        let mut shape = tensor.shape.clone();
        if let Some(first) = shape.first_mut() {
            *first = self.rows.len();
        }
        TensorSpec { name: self.tensor.clone(), dtype: tensor.dtype, shape }
    }

    /// Returns the rows of a chunk.
    pub fn chunk(&self, index: usize) -> Range<usize> {
        let first = self.rows.start + index * self.chunk_rows;
        first..self.rows.end.min(first.saturating_add(self.chunk_rows))
    }

    /// Returns the expected digest of a chunk.
    pub fn digest(&self, index: usize) -> Digest {
        Digest { kind: DigestKind::Crc64, value: self.chunks[index] }
    }
}

impl Manifest {
    /// Parses a manifest and proves that it is consistent in itself.
    ///
    /// # Errors
    /// A [`Fault`] that names the tensor and the file.
    pub fn parse(bytes: Vec<u8>) -> Result<Manifest, Fault> {
        let manifest = text::read(&seal::unseal(bytes)?)?;
        // Every rank has a file, even if it contains no tensors.
        let (expected, got) = (manifest.files.len(), manifest.world_size);
        if expected != got || got == 0 {
            let reason = format!(
                "it says that {got} ranks saved it, but lists {expected} files, not one for each rank; use \
                 another checkpoint"
            );
            return Err(Fault::new(reason));
        }
        for (name, tensor) in &manifest.tensors {
            let (name, dtype, shape) = (name.clone(), tensor.dtype, tensor.shape.clone());
            TensorEntry::place(TensorSpec { name, dtype, shape }, 0)?;
        }
        let mut names = std::collections::BTreeSet::new();
        for file in &manifest.files {
            let name = plain_name(&file.name);
            let is_plain = name.ends_with(".safetensors") && is_plain_name(name);
            if !is_plain || !names.insert(&file.name) {
                let reason = format!(
                    "it names the file `{}`, which is not a plain name ending in .safetensors, or names it twice",
                    file.name
                );
                return Err(Fault::new(reason));
            }
            file.shards.iter().try_for_each(|shard| manifest.check_shard(&file.name, shard))?;
        }
        manifest.check_rows()?;
        Ok(manifest)
    }

    /// Returns the bytes of the file.
    ///
    /// # Errors
    /// [`Fault::Unsupported`] if a value is nested more deeply than JSON readers accept.
    pub fn to_bytes(&self) -> Result<Vec<u8>, Fault> {
        Ok(seal::seal(&text::write(self)?))
    }

    fn check_shard(&self, file: &str, shard: &ManifestShard) -> Result<(), Fault> {
        let (tensor, rows) = (&shard.tensor, &shard.rows);
        let whole = self.tensors.get(tensor).ok_or_else(|| {
            let what = format!("rows of tensor `{tensor}`, which the manifest does not describe");
            Fault::new(format!("file `{file}` holds {what}"))
        })?;
        let (Range { start, end }, row_count) = (rows, whole.row_count());
        if start > end || *end > row_count {
            let what = format!("rows {start}..{end} of tensor `{tensor}`, which has {row_count}");
            return Err(Fault::new(format!("file `{file}` holds {what}")));
        }
        let chunk_rows = shard.chunk_rows;
        let expected = rows.len().checked_div(chunk_rows).map(|_| rows.len().div_ceil(chunk_rows));
        let got = shard.chunks.len();
        if expected != Some(got) {
            let expected = expected.unwrap_or(0);
            let reason = format!(
                "file `{file}` has {got} checksums for rows {start}..{end} of tensor `{tensor}`, not \
                 {expected}, with {chunk_rows} rows per chunk"
            );
            return Err(Fault::new(reason));
        }
        Ok(())
    }

    /// Proves that every row of every tensor is in exactly one file.
    fn check_rows(&self) -> Result<(), Fault> {
        let mut held: BTreeMap<&str, Vec<(Range<u64>, &str)>> = BTreeMap::new();
        for file in &self.files {
            for shard in &file.shards {
                held.entry(&shard.tensor).or_default().push((wide(&shard.rows), &file.name));
            }
        }
        for (name, tensor) in &self.tensors {
            let runs = held.remove(name.as_str()).unwrap_or_default();
            let Some((rows, holders)) = first_coverage_fault(tensor.row_count() as u64, runs) else {
                continue;
            };
            let place = match holders {
                None => "no file".to_owned(),
                Some((first, second)) => format!("both `{first}` and `{second}`"),
            };
            let Range { start, end } = rows;
            return Err(Fault::new(format!("rows {start}..{end} of tensor `{name}` are in {place}")));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
