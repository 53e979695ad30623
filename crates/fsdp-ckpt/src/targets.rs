//! Formats that are written: each plans its files from names, types and shapes alone.
//!
//! A target makes an [`OutputPlan`](crate::transfer::OutputPlan) of a [`Selection`]; it reads no tensor and
//! opens no file. What it cannot hold it must not drop silently: it says so in an error, or offers a function
//! that removes it from the selection and returns what was removed, for the report.

pub mod safetensors;

use crate::{
    checkpoint::{Key, Object, Role},
    safetensors::TensorType,
};

/// What is to be written, in the order of names.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// The tensors. Names are unique.
    pub tensors: Vec<OutputTensor>,
    /// Everything else.
    pub values: Vec<Object>,
}

/// A tensor as it is to be written.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputTensor {
    /// Its name in the output: `path` joined by dots.
    pub name: String,
    /// Its place in the nested state dict of the output.
    pub path: Vec<Key>,
    /// What it is to training.
    pub role: Role,
    /// Its name in the source checkpoint.
    pub source: String,
    /// Element type in the output; another one than the source's converts.
    pub dtype: TensorType,
    /// Dimensions, slowest first.
    pub shape: Vec<u64>,
    /// The index in [`Selection::tensors`] of an earlier tensor of the same type and shape whose bytes in the
    /// source are the very same ones: tied weights. Never the index of a tensor that is tied itself.
    pub tied_to: Option<usize>,
}

impl OutputTensor {
    /// Number of elements.
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
