//! Fills values on the stack: a list or a set with items, a dict with pairs, an object of a known class with its state,
//! and an object of an unknown class with any of these. Nothing else can be filled.
//!
//! Python calls methods of the value on the stack here, so any object can take part. Checking the kind of the value
//! first makes sure that only data is built.

use super::{
    graph::{Node, NodeId},
    machine::{Machine, underflow, wrong_operand, wrong_use},
};
use crate::error::Fault;

impl Machine<'_> {
    pub(super) fn append_one(&mut self) -> Result<(), Fault> {
        let item = self.pop()?;
        self.list()?.push(item);
        Ok(())
    }

    pub(super) fn append_all(&mut self) -> Result<(), Fault> {
        let items = self.pop_to_mark()?;
        self.list()?.extend(items);
        Ok(())
    }

    pub(super) fn add_all(&mut self) -> Result<(), Fault> {
        let items = self.pop_to_mark()?;
        match self.top_node()? {
            (_, Node::Set(set)) => set.extend(items),
            (_, Node::Opaque(object)) => object.parts.extend(items),
            (at, other) => return Err(wrong_operand(at, "a set", other)),
        }
        Ok(())
    }

    pub(super) fn set_one(&mut self) -> Result<(), Fault> {
        let [key, value] = self.pop_many()?;
        self.dict()?.push((key, value));
        Ok(())
    }

    pub(super) fn set_all(&mut self) -> Result<(), Fault> {
        let items = self.pop_to_mark()?;
        let (pairs, rest) = items.as_chunks::<2>();
        if !rest.is_empty() {
            return Err(underflow(self.at));
        }
        self.dict()?.extend(pairs.iter().map(|&[key, value]| (key, value)));
        Ok(())
    }

    /// Sets the state of the object on top of the stack.
    pub(super) fn build(&mut self) -> Result<(), Fault> {
        let state = self.pop()?;
        let is_dict = matches!(self.node(state), Node::Dict(_));
        match self.top_node()? {
            // Attributes of an ordered dict, such as the versions in state dicts of modules, are not needed.
            (_, Node::Dict(_)) if is_dict => Ok(()),
            (_, Node::Opaque(object)) => {
                object.parts.push(state);
                Ok(())
            }
            (at, Node::Object(object)) => {
                if !object.class.may_have_state() {
                    return Err(wrong_use(at, object.class, "given a state"));
                }
                if object.state.replace(state).is_some() {
                    return Err(wrong_use(at, object.class, "given a state twice"));
                }
                Ok(())
            }
            (at, other) => Err(wrong_operand(at, "an object that has a state", other)),
        }
    }

    fn list(&mut self) -> Result<&mut Vec<NodeId>, Fault> {
        match self.top_node()? {
            (_, Node::List(items)) => Ok(items),
            (_, Node::Opaque(object)) => Ok(&mut object.parts),
            (at, other) => Err(wrong_operand(at, "a list", other)),
        }
    }

    fn dict(&mut self) -> Result<&mut Vec<(NodeId, NodeId)>, Fault> {
        match self.top_node()? {
            (_, Node::Dict(pairs)) => Ok(pairs),
            (_, Node::Opaque(object)) => Ok(&mut object.pairs),
            (at, other) => Err(wrong_operand(at, "a dict", other)),
        }
    }

    /// The value on top of the stack, and the position of the opcode.
    fn top_node(&mut self) -> Result<(usize, &mut Node), Fault> {
        let target = self.top()?;
        Ok((self.at, &mut self.nodes[target.0 as usize]))
    }
}
