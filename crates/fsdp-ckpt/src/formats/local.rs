//! A tensor as one rank's file holds it: a view of stored elements.

use std::ops::Range;

use super::rank_fault::strided;
use crate::{
    checkpoint::{Chunk, Key, Region, Role, Tensor, element_count},
    error::Fault,
    safetensors::TensorType,
    torch::StoredTensor,
};

/// A tensor in a rank's file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LocalTensor {
    /// Element type.
    pub(crate) dtype: TensorType,
    /// Dimensions, slowest first.
    pub(crate) shape: Vec<u64>,
    /// Strides in elements.
    pub(crate) strides: Vec<u64>,
    /// Index of its file in the checkpoint's sources.
    pub(crate) source: usize,
    /// Byte offset of the first element in the source.
    pub(crate) offset: u64,
}

impl LocalTensor {
    /// Makes a local tensor of a tensor stored in the file with index `source`.
    pub(crate) fn of(stored: &StoredTensor, source: usize) -> LocalTensor {
        let StoredTensor { dtype, shape, strides, offset } = stored.clone();
        LocalTensor { dtype, shape, strides, source, offset }
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> u64 {
        element_count(&self.shape).expect("products of shapes are checked when a file is read")
    }

    /// The local tensor as a whole tensor of a checkpoint.
    pub(crate) fn to_tensor(&self, path: Vec<Key>, role: Role) -> Tensor {
        Tensor { path, role, dtype: self.dtype, shape: self.shape.clone(), chunks: vec![self.whole()] }
    }

    /// The local tensor as a chunk of a tensor of `shape`, with its first element at `offsets`.
    pub(crate) fn chunk_at(&self, offsets: Vec<u64>, shape: &[u64]) -> Chunk {
        let region = Region::Box { offsets, sizes: self.shape.clone(), strides: self.strides.clone() };
        Chunk { region: region.simplified(shape), source: self.source, offset: self.offset }
    }

    /// The local tensor as the only chunk of a tensor.
    pub(crate) fn whole(&self) -> Chunk {
        self.chunk_at(vec![0; self.shape.len()], &self.shape)
    }

    /// The local tensor as one run of elements. Fails if they are not contiguous in C order.
    pub(crate) fn flat(&self, name: &str) -> Result<LocalTensor, Fault> {
        let len = self.len();
        match self.whole().region {
            Region::Flat(range) if range == (0..len) => {
                Ok(LocalTensor { shape: vec![len], strides: vec![1], ..self.clone() })
            }
            _ => Err(strided(name)),
        }
    }

    /// A range of a tensor of one dimension that is contiguous.
    pub(crate) fn run(&self, range: Range<u64>) -> LocalTensor {
        let offset = self.offset + range.start * self.dtype.size_bytes() as u64;
        LocalTensor { shape: vec![range.end - range.start], offset, ..self.clone() }
    }
}
