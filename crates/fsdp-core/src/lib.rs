//! Contracts, layout, schedule, checker, ledger and engine of fully sharded data parallel training.
#![forbid(unsafe_code)]

pub mod checker;
pub mod comm;
mod dtype;
pub mod engine;
mod error;
mod exact;
pub mod layout;
pub mod ledger;
pub mod memory;
pub mod model;
pub mod program;
mod rank;
pub mod schedule;
pub mod state;
#[cfg(test)]
mod testing;
pub mod tree;
pub mod update;
pub mod wrap;

pub use dtype::DType;
pub use error::Error;
pub use exact::ExactSum;
pub use memory::Memory;
pub use rank::{Mesh, Queue, Rank};
