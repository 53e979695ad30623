//! Formats that are written: each makes an [`OutputPlan`](crate::transfer::OutputPlan) of a [`Selection`].
//!
//! A selection says what the output holds, whatever its format: tensors under the names, types and nesting
//! that they get, and values. Renaming, choosing and converting are decided when it is made; a target only
//! lays it out. Targets read nothing and write nothing: their plans follow from names, types and shapes.

pub mod dcp;
pub mod native;
pub mod safetensors;
pub mod torch_file;

pub(crate) mod torch_archive;

#[cfg(test)]
pub(crate) mod assemble;
#[cfg(test)]
mod round_trips;

use crate::{
    checkpoint::{Key, Object, Role},
    safetensors::TensorType,
};

/// What an output holds, in the order in which it is listed there.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Selection {
    /// The tensors. Names are unique, and none is also the name of a value.
    pub tensors: Vec<OutputTensor>,
    /// Everything that is not a tensor.
    pub values: Vec<Object>,
}

/// A tensor of an output.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputTensor {
    /// Its name in the output.
    pub name: String,
    /// Its place in a nested output; formats without nesting use the name.
    pub path: Vec<Key>,
    /// What it is to training.
    pub role: Role,
    /// The name of the tensor in the source checkpoint that its elements come from.
    pub source: String,
    /// Element type in the output.
    pub dtype: TensorType,
    /// Dimensions, slowest first.
    pub shape: Vec<u64>,
    /// Index in [`Selection::tensors`] of an earlier tensor with the same elements, dtype and shape, whose
    /// storage this one shares (tied weights). That tensor shares no other's. Formats that cannot share
    /// storage write the elements again, or leave the later tensor out.
    pub tied_to: Option<usize>,
}

impl OutputTensor {
    /// Number of elements.
    ///
    /// Shapes come from tensors that a reader has checked, so that this does not overflow.
    pub fn len(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of all elements in the output.
    pub fn len_bytes(&self) -> u64 {
        self.len() * self.dtype.size_bytes() as u64
    }
}
