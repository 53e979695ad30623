//! The core of fully sharded data parallel training, without effects: no clock, no randomness, no
//! environment, no threads, no files.
//!
//! A training step is data. In reading order:
//!
//! | module | what |
//! |---|---|
//! | [`model`] | what a model says about itself: parameters, modules, blocks |
//! | [`wrap`] | which parameters form a unit |
//! | [`layout`] | where every element of a unit lies on every rank |
//! | [`tree`] | the order in which gradients are added, everywhere |
//! | [`schedule`] | a step as operations on queues, compiled from policies |
//! | [`checker`] | proves a schedule safe before it runs |
//! | [`ledger`] | predicts memory from a schedule |
//! | [`plan`] | all that is the same on every rank |
//! | [`scalars`] | loss, norm and stop flag of a step, and what an update needs of them |
//! | [`engine`] | executes a schedule on one rank |
//! | [`memory`], [`comm`], [`program`], [`update`] | the contracts of devices, communicators, models and optimizers |
#![forbid(unsafe_code)]

pub mod checker;
pub mod comm;
mod digest;
mod dtype;
pub mod engine;
mod error;
mod exact;
mod failure;
pub mod layout;
pub mod ledger;
pub mod memory;
pub mod model;
pub mod out_of_memory;
pub mod plan;
pub mod program;
mod rank;
mod run_clock;
pub mod scalars;
pub mod schedule;
#[cfg(test)]
mod testing;
pub mod tree;
pub mod update;
pub mod wrap;

pub use digest::Digest;
pub use dtype::DType;
pub use error::Error;
pub use exact::ExactSum;
pub use failure::FailureKind;
pub use memory::Memory;
pub use out_of_memory::{MemoryKind, OutOfMemory};
pub use rank::{Mesh, Queue, Rank};
pub use run_clock::RunClock;
pub use scalars::Tallies;
