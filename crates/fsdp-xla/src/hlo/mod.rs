//! A writer for StableHLO: values with shapes, and a method per operation, which checks the shapes of its operands (a
//! mismatch is a bug in this crate and panics) and appends the operation.
//!
//! It writes text rather than bytecode because every plugin that was tried (StableHLO 1.7 to 1.24) accepts it, and
//! people can read it.

mod arithmetic;
mod builder;
mod collectives;
mod loops;
mod operation;
mod scan;
mod shapes;
mod types;

pub(crate) use arithmetic::Product;
pub(crate) use builder::{Builder, list};
pub use collectives::Collective;
pub(crate) use collectives::Groups;
pub(crate) use scan::{ArgumentStack, OutputKind, Signature, Stacked};
pub(crate) use types::{Element, Name, Shape, Value};
