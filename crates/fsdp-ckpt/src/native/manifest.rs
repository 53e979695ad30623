//! The manifest of a native checkpoint: what there is, where it is, what it must give, and the run's state.
//!
//! Pure: bytes in, values out. Parsing proves everything that can be proven without the other files: that every
//! row of every tensor is in exactly one of them, and that there is a checksum for each of its chunks. The
//! text itself is the business of `text`, its digest that of `seal`.

mod coverage;
mod text;

use std::{collections::BTreeMap, ops::Range};

pub(super) use text::tensor_text;

use super::{objects::plain_name, plan::row_count, seal};
use crate::{
    checkpoint::{Key, Object, Role},
    digest::{Digest, DigestKind},
    error::NativeFault,
    safetensors::{TensorSpec, TensorType},
};

/// The name of the manifest in the directory of a checkpoint.
pub const MANIFEST_FILE: &str = "manifest.json";

/// What a native checkpoint holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Manifest {
    /// Ranks that saved it.
    pub world_size: usize,
    /// The tensors by name.
    pub tensors: BTreeMap<String, ManifestTensor>,
    /// The files with their parts of the tensors, rank 0 first.
    pub files: Vec<ManifestFile>,
    /// What is not a tensor, from converted checkpoints, by name.
    pub values: BTreeMap<String, Object>,
    /// The state of the run, as its owner gave it.
    pub run_state: serde_json::Map<String, serde_json::Value>,
}

/// A whole tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestTensor {
    /// Element type.
    pub dtype: TensorType,
    /// Dimensions, slowest first.
    pub shape: Vec<usize>,
    /// Its place in a nested state dict.
    pub path: Vec<Key>,
    /// What it is to training.
    pub role: Role,
}

/// A file of the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestFile {
    /// Its name in the directory; in object stores with the attempt that has written it and a slash in front.
    pub name: String,
    /// Its length in bytes.
    pub len: u64,
    /// Bytes in front of the data.
    pub data_start: u64,
    /// The digest of these.
    pub header: Digest,
    /// What it holds.
    pub shards: Vec<ManifestShard>,
}

/// Rows of a tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestShard {
    /// Name of the tensor.
    pub tensor: String,
    /// The rows of the tensor.
    pub rows: Range<usize>,
    /// Rows of each chunk but the last, which may have fewer.
    pub chunk_rows: usize,
    /// The CRC-64 of each chunk.
    pub chunks: Vec<u64>,
}

impl ManifestTensor {
    /// Rows of the tensor; a 0-d tensor has one.
    pub fn row_count(&self) -> usize {
        row_count(&self.shape)
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> u64 {
        // Parsing and planning have checked the product.
        self.shape.iter().skip(1).map(|&size| size as u64).product::<u64>() * self.dtype.size_bytes() as u64
    }

    fn check_size(&self, tensor: &str) -> Result<(), NativeFault> {
        let size_bytes = self.dtype.size_bytes() as u64;
        let row = self.shape.iter().skip(1).try_fold(size_bytes, |len, &size| len.checked_mul(size as u64));
        match row.and_then(|row| row.checked_mul(self.row_count() as u64)) {
            Some(_) => Ok(()),
            None => Err(NativeFault::SizeOverflow {
                tensor: tensor.to_owned(),
                dtype: self.dtype,
                shape: self.shape.clone(),
            }),
        }
    }
}

impl ManifestShard {
    /// What the file must hold under the tensor's name.
    pub fn spec(&self, tensor: &ManifestTensor) -> TensorSpec {
        let mut shape = tensor.shape.clone();
        if let Some(first) = shape.first_mut() {
            *first = self.rows.len();
        }
        TensorSpec { name: self.tensor.clone(), dtype: tensor.dtype, shape }
    }

    /// The rows of a chunk.
    pub fn chunk(&self, index: usize) -> Range<usize> {
        let first = self.rows.start + index * self.chunk_rows;
        first..self.rows.end.min(first.saturating_add(self.chunk_rows))
    }

    /// What a chunk must give.
    pub fn digest(&self, index: usize) -> Digest {
        Digest { kind: DigestKind::Crc64, value: self.chunks[index] }
    }
}

impl Manifest {
    /// Reads a manifest and proves that it is complete in itself.
    ///
    /// # Errors
    /// A [`NativeFault`] that names the tensor and the file.
    pub fn parse(bytes: Vec<u8>) -> Result<Manifest, NativeFault> {
        let manifest = text::read(&seal::unseal(bytes)?)?;
        // Every rank has a file, be it one without tensors.
        let (expected, got) = (manifest.files.len(), manifest.world_size);
        if expected != got || got == 0 {
            return Err(NativeFault::WorldSize { expected, got });
        }
        manifest.tensors.iter().try_for_each(|(name, tensor)| tensor.check_size(name))?;
        let mut names = std::collections::BTreeSet::new();
        for file in &manifest.files {
            let name = plain_name(&file.name);
            let is_plain = name.ends_with(".safetensors") && !name.contains(['/', '\\', '\0']);
            if !is_plain || !names.insert(&file.name) {
                return Err(NativeFault::BadFileName { name: file.name.clone() });
            }
            file.shards.iter().try_for_each(|shard| manifest.check_shard(&file.name, shard))?;
        }
        coverage::check(&manifest)?;
        Ok(manifest)
    }

    /// The bytes of the file.
    ///
    /// # Errors
    /// [`NativeFault::TooDeep`] if a value is nested more deeply than JSON readers go.
    pub fn to_bytes(&self) -> Result<Vec<u8>, NativeFault> {
        Ok(seal::seal(&text::write(self)?))
    }

    fn check_shard(&self, file: &str, shard: &ManifestShard) -> Result<(), NativeFault> {
        let (file, tensor) = (file.to_owned(), shard.tensor.clone());
        let Some(whole) = self.tensors.get(&tensor) else {
            return Err(NativeFault::UndescribedTensor { file, tensor });
        };
        let (rows, row_count) = (shard.rows.clone(), whole.row_count());
        if rows.start > rows.end || rows.end > row_count {
            return Err(NativeFault::BadRows { file, tensor, rows: [rows.start, rows.end], row_count });
        }
        let expected =
            rows.len().checked_div(shard.chunk_rows).map(|_| rows.len().div_ceil(shard.chunk_rows));
        if expected != Some(shard.chunks.len()) {
            let (chunk_rows, got) = (shard.chunk_rows, shard.chunks.len());
            let expected = expected.unwrap_or(0);
            return Err(NativeFault::ChunkCount { file, tensor, rows, chunk_rows, expected, got });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
