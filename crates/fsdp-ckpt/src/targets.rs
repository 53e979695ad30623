//! Writable formats: each turns a [`Selection`] into an [`OutputPlan`](crate::transfer::OutputPlan).
//!
//! A selection defines the content of the output, whatever its format: tensors with their final names, dtypes and
//! nesting, and values. Renaming, choosing and converting are decided when the selection is made; a target only lays it
//! out. Targets read and write nothing: their plans depend on names, dtypes and shapes only.

pub mod dcp;
pub mod native;
pub mod safetensors;
pub mod torch_file;

pub(crate) mod torch_archive;

#[cfg(test)]
pub(crate) mod assemble;
#[cfg(test)]
mod round_trips;

use std::{collections::BTreeMap, path::Path};

use crate::{
    checkpoint::{Key, Object, Role},
    error::Error,
    safetensors::TensorType,
};

/// The content of an output, in its order in the output.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Selection {
    /// The tensors. Names are unique, and no value has the name of a tensor.
    pub tensors: Vec<OutputTensor>,
    /// Everything that is not a tensor.
    pub values: Vec<Object>,
}

impl Selection {
    /// Removes all but one of the tensors that share their elements; returns pairs of a removed name and the name that
    /// is kept for it.
    ///
    /// The first tensor that is not the output weights is kept: readers derive the output weights from the input
    /// weights, but not the other way round.
    pub(crate) fn drop_tied(&mut self) -> Vec<(String, String)> {
        let tensors = &mut self.tensors;
        let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (index, tensor) in tensors.iter().enumerate() {
            groups.entry(tensor.tied_to.unwrap_or(index)).or_default().push(index);
        }
        let mut tied = Vec::new();
        for members in groups.values().filter(|members| members.len() > 1) {
            let is_input = |index: &usize| !is_head(&tensors[*index].name);
            let kept = members.iter().copied().find(is_input).unwrap_or(members[0]);
            let copies = members.iter().filter(|&&index| index != kept);
            tied.extend(copies.map(|&index| (tensors[index].name.clone(), tensors[kept].name.clone())));
            members.iter().for_each(|&index| tensors[index].tied_to = (index != kept).then_some(kept));
        }
        tensors.retain(|tensor| tensor.tied_to.is_none());
        tied
    }

    /// Refuses a tensor whose type or size PyTorch does not have.
    pub(crate) fn expect_torch_types(&self, destination: &Path) -> Result<(), Error> {
        for OutputTensor { name, dtype, shape, .. } in &self.tensors {
            let fault = match shape.iter().find(|&&size| i64::try_from(size).is_err()) {
                Some(size) => format!("has a dimension of {size}, more than PyTorch can count"),
                None if dtype.torch_name().is_none() => {
                    format!("is {dtype}, a type that PyTorch does not have")
                }
                None => continue,
            };
            let reason = format!("tensor `{name}` {fault}; convert to safetensors, or leave the tensor out");
            return Err(Error::bad_request(destination, reason));
        }
        Ok(())
    }
}

/// Whether this is a name of output weights.
fn is_head(name: &str) -> bool {
    ["lm_head.weight", "output.weight", "embed_out.weight"].iter().any(|head| name.ends_with(head))
}

/// A tensor of an output.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputTensor {
    /// Name in the output.
    pub name: String,
    /// Path in a nested output; formats without nesting use the name.
    pub path: Vec<Key>,
    /// Role in training.
    pub role: Role,
    /// Name of the tensor in the source checkpoint that provides the elements.
    pub source: String,
    /// Dtype in the output.
    pub dtype: TensorType,
    /// Dimensions, slowest first.
    pub shape: Vec<u64>,
    /// Index in [`Selection::tensors`] of an earlier tensor with the same elements, dtype and shape, whose storage this
    /// one shares (tied weights). That tensor itself shares no other storage. Formats that cannot share storage write
    /// the elements again, or leave the later tensor out.
    pub tied_to: Option<usize>,
}

impl OutputTensor {
    /// Number of elements.
    ///
    /// This does not overflow, because the shapes come from tensors that a reader has checked.
    pub fn len(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Whether the tensor has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Size of all elements in the output, in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len() * self.dtype.size_bytes() as u64
    }
}
