//! Names outside of the table: classes of users and libraries, and objects of these classes.
//!
//! Their meaning is unknown, so they stay opaque. Nothing is looked up or run. An object keeps only the name of its
//! class and the parts that the pickle put into it, because these may include tensors.

use super::graph::NodeId;
use crate::{checkpoint::Global, error::Fault};

/// A class or function that is not in the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unknown {
    /// Its name.
    pub(crate) global: Global,
    /// Position in the pickle of the opcode that names it.
    pub(crate) offset: u64,
}

/// An object of an unknown class, or the result of an unknown function.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct OpaqueNode {
    /// The class or function.
    pub(crate) class: Global,
    /// Arguments, states, and items of a list or set, in the order of the pickle.
    pub(crate) parts: Vec<NodeId>,
    /// Pairs of a dict.
    pub(crate) pairs: Vec<(NodeId, NodeId)>,
}

impl Unknown {
    /// The fault for an unknown name where none is allowed.
    pub(crate) fn fault(&self) -> Fault {
        let Global { module, name } = self.global.clone();
        Fault::UnknownGlobal { offset: self.offset, module, name }
    }
}

impl OpaqueNode {
    /// The part with this index: first the parts, then keys and values in turn.
    pub(super) fn part(&self, index: usize) -> Option<NodeId> {
        let Some(index) = index.checked_sub(self.parts.len()) else { return Some(self.parts[index]) };
        let (key, item) = *self.pairs.get(index / 2)?;
        Some(if index.is_multiple_of(2) { key } else { item })
    }

    /// Drops all parts; returns whether there were any.
    pub(super) fn forget_parts(&mut self) -> bool {
        let had_parts = !self.parts.is_empty() || !self.pairs.is_empty();
        (self.parts, self.pairs) = (Vec::new(), Vec::new());
        had_parts
    }
}
