//! Parses pickles of protocols 2 to 5, as far as checkpoint formats use them, into inert data.
//!
//! A pickle is a program for a small stack machine, and Python runs whatever functions it names. Here it only describes
//! data: [`parse`] returns a [`Graph`] of plain values, in which classes and functions are names, and a call is an
//! object with its callee and arguments. Names in a closed table ([`globals`]) have a meaning here; all others are
//! [`opaque`]. Nothing is looked up, constructed or run.
//!
//! Hostile input costs bounded memory and time: every opcode makes at most one node; nodes, memo entries, depth and
//! lengths are limited; containers can only be filled with what they hold; cycles are refused; and shared parts stay
//! shared until [`Graph::value`] expands them under a separate limit.

mod fill;
mod globals;
mod graph;
mod input;
mod limits;
mod machine;
mod memo;
mod opaque;
mod opcode;
mod rebuild;
mod value;
pub(crate) mod writer;

#[cfg(test)]
mod tests;

pub(crate) use globals::Known;
pub(crate) use graph::{Graph, Node, NodeId, ObjectNode};
pub(crate) use limits::PICKLE_BYTES_MAX;
pub(crate) use opaque::Unknown;
pub(crate) use value::Budget;

use crate::{checkpoint::Global, error::Fault};
use limits::too_large;

/// Whether a class or function is in the table.
pub(crate) fn is_known(global: &Global) -> bool {
    Known::find(&global.module, &global.name).is_some()
}

/// Parses one pickle, which must fill `bytes`.
///
/// # Errors
/// A [`Fault`] with the position of the problem.
pub(crate) fn parse(bytes: &[u8]) -> Result<Graph, Fault> {
    if bytes.len() > PICKLE_BYTES_MAX {
        return Err(too_large(0, "bytes", PICKLE_BYTES_MAX));
    }
    match parse_first(bytes)? {
        (graph, len) if len == bytes.len() => Ok(graph),
        (_, len) => Err(Fault::at(len, format!("{} bytes follow its end", bytes.len() - len))),
    }
}

/// Parses the pickle at the start of `bytes`, and returns its length too.
///
/// # Errors
/// Those of [`parse`].
pub(crate) fn parse_first(bytes: &[u8]) -> Result<(Graph, usize), Fault> {
    let (nodes, root, len) = machine::run(bytes)?;
    Ok((Graph::checked(nodes, root)?, len))
}
