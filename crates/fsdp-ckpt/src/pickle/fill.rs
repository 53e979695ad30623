//! Filling what is on the stack: a list with items, a set with items, a dict with pairs, an object of a known
//! class with its state, one of an unknown class with anything, and nothing with anything else.
//!
//! Python calls methods of whatever is on the stack here, so that any object can take part. Checking the kind
//! first is what keeps this data.

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

    /// Sets the state of the object on top.
    pub(super) fn build(&mut self) -> Result<(), Fault> {
        let state = self.pop()?;
        let is_dict = matches!(self.node(state), Node::Dict(_));
        match self.top_node()? {
            // Attributes of an ordered dict: state dicts of modules keep versions there. Nothing reads them.
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

    /// What is on top, and where the opcode is.
    fn top_node(&mut self) -> Result<(usize, &mut Node), Fault> {
        let target = self.top()?;
        Ok((self.at, &mut self.nodes[target.0 as usize]))
    }
}
