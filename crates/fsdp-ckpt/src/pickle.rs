//! Pickles as inert data: protocol 2 to 5, as far as checkpoint formats use them.
//!
//! A pickle is a program for a small stack machine, and Python runs whatever that program names. Here it only
//! describes: [`parse`] returns a [`Graph`] of plain values, in which classes and functions are names and a call is
//! an object that says what would have been called with what. Names of a closed table ([`globals`]) have a meaning
//! here; all others are [`opaque`]. Nothing is looked up, constructed or run.
//!
//! Hostile input costs bounded memory and time: every opcode makes at most one node, nodes, memo entries,
//! depth and lengths have limits, containers are only filled as what they are, cycles are refused, and parts
//! that are shared stay shared until [`Graph::value`] writes them out under a limit of its own.

mod fill;
mod globals;
mod graph;
mod input;
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
pub(crate) use opaque::Unknown;
pub(crate) use value::Budget;

use crate::{checkpoint::Global, error::Fault};

/// The longest pickle that is read.
pub(crate) const PICKLE_BYTES_MAX: usize = 1 << 30;
/// Values, counting shared ones once.
const NODES_MAX: usize = 1 << 26;
/// Entries of the memo.
const MEMO_MAX: usize = 1 << 26;
/// Bytes of one text, byte string or large integer.
const STRING_BYTES_MAX: usize = 1 << 28;
/// Containers inside containers.
const DEPTH_MAX: u32 = 200;
/// Bytes that values may take when shared parts are written out at every place.
const EXPANDED_BYTES_MAX: u64 = 1 << 28;

/// Whether a class or function is in the table.
pub(crate) fn is_known(global: &Global) -> bool {
    Known::find(&global.module, &global.name).is_some()
}

/// Reads one pickle, which must fill `bytes`.
///
/// # Errors
/// A [`Fault`] that says at which byte what is wrong.
pub(crate) fn parse(bytes: &[u8]) -> Result<Graph, Fault> {
    if bytes.len() > PICKLE_BYTES_MAX {
        return Err(too_large(0, "bytes", PICKLE_BYTES_MAX));
    }
    match parse_first(bytes)? {
        (graph, len) if len == bytes.len() => Ok(graph),
        (_, len) => Err(Fault::at(len, format!("{} bytes follow its end", bytes.len() - len))),
    }
}

/// Reads the pickle that `bytes` begin with; returns its length too.
///
/// # Errors
/// As [`parse`].
pub(crate) fn parse_first(bytes: &[u8]) -> Result<(Graph, usize), Fault> {
    let (nodes, root, len) = machine::run(bytes)?;
    Ok((Graph::checked(nodes, root)?, len))
}

/// A limit is exceeded, as was noticed at a byte.
fn too_large(at: usize, what: &str, limit: usize) -> Fault {
    Fault::at(at, format!("it has more than {limit} {what}"))
}
