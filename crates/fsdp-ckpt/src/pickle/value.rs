//! Expands values of a graph to trees, under a limit on their size.
//!
//! With shared parts, a few bytes can describe a value that contains another one a billion times. Expansion counts
//! every byte of the result and stops at the limit.

use super::{
    graph::{Graph, Node, NodeId},
    limits::EXPANDED_BYTES_MAX,
};
use crate::{checkpoint::Value, error::Fault};

/// Bytes that expanded values may still take.
#[derive(Debug)]
pub(crate) struct Budget(u64);

impl Default for Budget {
    fn default() -> Budget {
        Budget(EXPANDED_BYTES_MAX)
    }
}

impl Budget {
    /// Takes the bytes of one value whose own data has `len` bytes.
    pub(crate) fn take(&mut self, len: usize) -> Result<(), Fault> {
        let need = (size_of::<Value>() + len) as u64;
        let expansion = || format!("expanded, its shared parts need more than {EXPANDED_BYTES_MAX} bytes");
        self.0 = self.0.checked_sub(need).ok_or_else(|| Fault::new(expansion()))?;
        Ok(())
    }
}

impl Graph {
    /// Expands the value at `id` to a tree. An object stored outside of the pickle becomes its identifier.
    ///
    /// # Errors
    /// If the tree exceeds the budget.
    pub(crate) fn value(&self, id: NodeId, budget: &mut Budget) -> Result<Value, Fault> {
        let len = match &self[id] {
            Node::Str(text) => text.len(),
            Node::Bytes(bytes) | Node::Long(bytes) => bytes.len(),
            Node::Unknown(unknown) => unknown.global.module.len() + unknown.global.name.len(),
            Node::Opaque(object) => object.class.module.len() + object.class.name.len(),
            _ => 0,
        };
        budget.take(len)?;
        Ok(match &self[id] {
            Node::None => Value::None,
            Node::Bool(bool) => Value::Bool(*bool),
            Node::Int(int) => Value::Int(*int),
            Node::Long(bytes) => Value::Long(bytes.to_vec()),
            Node::Float(float) => Value::Float(*float),
            Node::Str(text) => Value::Str(text.to_string()),
            Node::Bytes(bytes) => Value::Bytes(bytes.to_vec()),
            Node::List(items) => Value::List(self.values(items, budget)?),
            Node::Tuple(items) => Value::Tuple(self.values(items, budget)?),
            Node::Set(items) => Value::Set(self.values(items, budget)?),
            Node::Dict(pairs) => {
                let pair = |&(key, value): &(NodeId, NodeId)| {
                    Ok((self.value(key, budget)?, self.value(value, budget)?))
                };
                Value::Dict(pairs.iter().map(pair).collect::<Result<_, Fault>>()?)
            }
            Node::Global(global) => Value::Global(global.to_global()),
            Node::Object(object) => Value::Object {
                class: object.class.to_global(),
                args: self.values(self.args(object), budget)?,
                state: match object.state {
                    Some(state) => Some(Box::new(self.value(state, budget)?)),
                    None => None,
                },
            },
            Node::Unknown(unknown) => Value::Opaque(unknown.global.clone()),
            Node::Opaque(object) => Value::Opaque(object.class.clone()),
            Node::Persistent(id) => self.value(*id, budget)?,
        })
    }

    fn values(&self, items: &[NodeId], budget: &mut Budget) -> Result<Vec<Value>, Fault> {
        items.iter().map(|&item| self.value(item, budget)).collect()
    }
}
