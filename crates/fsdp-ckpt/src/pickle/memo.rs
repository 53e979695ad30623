//! The memo: values stored under a number, so that they can be pushed again.
//!
//! Writers number the values in order from 0, so nearly all are in a vector. Other numbers are legal.

use std::collections::HashMap;

use super::graph::NodeId;

/// Values by number.
#[derive(Default)]
pub(super) struct Memo {
    in_order: Vec<NodeId>,
    others: HashMap<u64, NodeId>,
}

impl Memo {
    /// Stores a value under a number, replacing any previous value.
    pub(super) fn insert(&mut self, index: u64, id: NodeId) {
        let next = self.in_order.len() as u64;
        if index < next {
            self.in_order[index as usize] = id;
        } else if index == next {
            self.others.remove(&index);
            self.in_order.push(id);
        } else {
            self.others.insert(index, id);
        }
    }

    /// The value under a number.
    pub(super) fn get(&self, index: u64) -> Option<NodeId> {
        self.in_order.get(index as usize).or_else(|| self.others.get(&index)).copied()
    }

    /// Number of stored values.
    pub(super) fn len(&self) -> u64 {
        (self.in_order.len() + self.others.len()) as u64
    }
}
