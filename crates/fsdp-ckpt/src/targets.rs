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

use std::collections::BTreeMap;

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

impl Selection {
    /// Removes all but one of the tensors that share their elements; returns the names of each copy and of what stays.
    ///
    /// The one that stays is the first that is not the output weights: readers make those out of the input
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
}

/// Whether a name is the one of output weights.
fn is_head(name: &str) -> bool {
    ["lm_head.weight", "output.weight", "embed_out.weight"].iter().any(|head| name.ends_with(head))
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
