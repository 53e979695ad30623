//! The attributes of a saved object whose class is not part of a checkpoint format, such as the arguments of a trainer.
//!
//! They are read as inert values, like everything else. Nothing of the class is known, so only what the pickle put into
//! the object is returned.

use super::{container, container::Container, graph_of};
use crate::{
    bytes::Section,
    checkpoint::Value,
    error::{Error, Fault},
    pickle::{Budget, Graph, Node, NodeId},
    zip::Archive,
};

/// Returns the attributes with text names of the object in the file that fills `section`.
///
/// # Errors
/// If it is not an archive of `torch.save` with such an object, or is damaged.
pub(crate) fn attributes(section: Section<'_>) -> Result<Vec<(String, Value)>, Error> {
    container::check_magic(section)?;
    let archive = Archive::open(section)?;
    let graph = graph_of(section, &Container::new(section, &archive)?)?;
    let state = match &graph[graph.root()] {
        Node::Opaque(object) => object.parts.iter().rev().find_map(|&part| graph.pairs(part)),
        _ => None,
    };
    let reason = "it does not hold an object with attributes";
    let state = state.ok_or_else(|| section.fault(Fault::new(reason)))?;
    let mut budget = Budget::default();
    let named = state.iter().filter_map(|&(key, value)| Some((graph.str(key)?.to_owned(), value)));
    let named = named.map(|(name, value)| Ok((name, graph.value(member_value(&graph, value), &mut budget)?)));
    named.collect::<Result<_, Fault>>().map_err(|fault| section.fault(fault))
}

/// The value of an enum's member, which is pickled as a call of its class with the value; other values stay as they are.
fn member_value(graph: &Graph, id: NodeId) -> NodeId {
    let Node::Opaque(object) = &graph[id] else { return id };
    match &object.parts[..] {
        [args] if object.pairs.is_empty() => match graph.items(*args) {
            Some(&[value]) => value,
            _ => id,
        },
        _ => id,
    }
}
