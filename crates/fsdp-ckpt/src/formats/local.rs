//! A tensor as one file of one rank holds it: a view of stored elements.

use super::shards::Shard;
use crate::{
    checkpoint::{Chunk, Key, Region, Role, Tensor, element_count},
    safetensors::TensorType,
    torch::StoredTensor,
};

/// A tensor in a file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LocalTensor {
    /// Element type.
    pub(crate) dtype: TensorType,
    /// Dimensions.
    pub(crate) shape: Vec<u64>,
    /// Distance of neighbours in each dimension, in elements.
    pub(crate) strides: Vec<u64>,
    /// Index of its source.
    pub(crate) source: usize,
    /// First byte of its first element in the source.
    pub(crate) offset: u64,
}

impl LocalTensor {
    /// A tensor of the file that is this source.
    pub(crate) fn of(stored: &StoredTensor, source: usize) -> LocalTensor {
        let StoredTensor { dtype, shape, strides, offset } = stored.clone();
        LocalTensor { dtype, shape, strides, source, offset }
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> u64 {
        element_count(&self.shape).expect("products of shapes are checked when a file is read")
    }

    /// All of it as a tensor of its own.
    pub(crate) fn to_tensor(&self, path: Vec<Key>, role: Role) -> Tensor {
        Tensor { path, role, dtype: self.dtype, shape: self.shape.clone(), chunks: vec![self.whole()] }
    }

    /// All of it as a chunk of a tensor of `shape`, with its first element at `offsets`.
    pub(crate) fn chunk_at(&self, offsets: Vec<u64>, shape: &[u64]) -> Chunk {
        let region = Region::Box { offsets, sizes: self.shape.clone(), strides: self.strides.clone() };
        Chunk { region: region.simplified(shape), source: self.source, offset: self.offset }
    }

    /// All of it as the only chunk of a tensor.
    pub(crate) fn whole(&self) -> Chunk {
        self.chunk_at(vec![0; self.shape.len()], &self.shape)
    }

    /// Its elements in C order as one run, if they lie so.
    pub(crate) fn shard(&self) -> Option<Shard> {
        let len = self.len();
        match self.whole().region {
            Region::Flat(range) if range == (0..len) => {
                Some(Shard { source: self.source, offset: self.offset, len })
            }
            _ => None,
        }
    }
}
