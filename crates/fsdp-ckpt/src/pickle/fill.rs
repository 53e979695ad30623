//! Filling what is on the stack: a list with items, a set with items, a dict with pairs, an object of a known
//! class with its state, and nothing with anything else.
//!
//! Python calls methods of whatever is on the stack here, so that any object can take part. Checking the kind
//! first is what keeps this data.

use super::{
    graph::{Node, NodeId},
    machine::Machine,
};
use crate::error::PickleFault;

impl Machine<'_> {
    pub(super) fn append_one(&mut self) -> Result<(), PickleFault> {
        let item = self.pop()?;
        self.list()?.push(item);
        Ok(())
    }

    pub(super) fn append_all(&mut self) -> Result<(), PickleFault> {
        let items = self.pop_to_mark()?;
        self.list()?.extend(items);
        Ok(())
    }

    pub(super) fn add_all(&mut self) -> Result<(), PickleFault> {
        let items = self.pop_to_mark()?;
        let (at, target) = (self.at, self.top()?);
        match &mut self.nodes[target.0 as usize] {
            Node::Set(set) => set.extend(items),
            other => {
                return Err(PickleFault::WrongOperand { at, expected: "a set", found: other.kind() });
            }
        }
        Ok(())
    }

    pub(super) fn set_one(&mut self) -> Result<(), PickleFault> {
        let [key, value] = self.pop_many()?;
        self.dict()?.push((key, value));
        Ok(())
    }

    pub(super) fn set_all(&mut self) -> Result<(), PickleFault> {
        let items = self.pop_to_mark()?;
        let (pairs, rest) = items.as_chunks::<2>();
        if !rest.is_empty() {
            return Err(PickleFault::StackUnderflow { at: self.at });
        }
        self.dict()?.extend(pairs.iter().map(|&[key, value]| (key, value)));
        Ok(())
    }

    /// Sets the state of the object on top.
    pub(super) fn build(&mut self) -> Result<(), PickleFault> {
        let state = self.pop()?;
        let (at, target) = (self.at, self.top()?);
        let is_dict = matches!(self.node(state), Node::Dict(_));
        match &mut self.nodes[target.0 as usize] {
            // Attributes of an ordered dict: state dicts of modules keep versions there. Nothing reads them.
            Node::Dict(_) if is_dict => Ok(()),
            Node::Object(object) => {
                let global = object.class.path();
                if !object.class.may_have_state() {
                    return Err(PickleFault::WrongUse { at, global, used: "given a state" });
                }
                if object.state.replace(state).is_some() {
                    return Err(PickleFault::WrongUse { at, global, used: "given a state twice" });
                }
                Ok(())
            }
            other => {
                let found = other.kind();
                Err(PickleFault::WrongOperand { at, expected: "an object that has a state", found })
            }
        }
    }

    fn list(&mut self) -> Result<&mut Vec<NodeId>, PickleFault> {
        let (at, target) = (self.at, self.top()?);
        match &mut self.nodes[target.0 as usize] {
            Node::List(items) => Ok(items),
            other => Err(PickleFault::WrongOperand { at, expected: "a list", found: other.kind() }),
        }
    }

    fn dict(&mut self) -> Result<&mut Vec<(NodeId, NodeId)>, PickleFault> {
        let (at, target) = (self.at, self.top()?);
        match &mut self.nodes[target.0 as usize] {
            Node::Dict(pairs) => Ok(pairs),
            other => Err(PickleFault::WrongOperand { at, expected: "a dict", found: other.kind() }),
        }
    }
}
