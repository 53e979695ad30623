//! The core of fully sharded data parallel training, free of side effects: no clock, randomness, environment, threads
//! or files.
//!
//! This crate is a part of [`fsdp`](https://docs.rs/fsdp), without a promise of stability: any version may change it.
//!
//! A training step is data: a schedule of operations that is compiled and checked before it runs. Modules in reading
//! order:
//!
//! | module | contents |
//! |---|---|
//! | [`model`] | the description of a model: parameters, modules, blocks |
//! | [`wrap`] | the grouping of parameters into units |
//! | [`layout`] | the position of every element of a unit on every rank |
//! | [`distribution`] | which box of a tensor each coordinate of a mesh holds |
//! | [`tree`] | the one order in which gradients are added |
//! | [`schedule`] | a step as operations on queues, compiled from policies |
//! | [`checker`] | proves a schedule safe before it runs |
//! | [`ledger`] | predicts memory from a schedule |
//! | [`plan`] | everything that is the same on every rank |
//! | [`scalars`] | loss, norm and stop flag of a step, and the factors that updates read |
//! | [`engine`] | executes a schedule on one rank |
//! | [`memory`], [`comm`], [`program`], [`update`] | the traits of devices, communicators, models and optimizers |
#![forbid(unsafe_code)]

pub mod checker;
mod collective;
pub mod comm;
mod digest;
pub mod distribution;
mod dtype;
pub mod engine;
mod error;
mod exact;
mod failure;
mod id;
pub mod layout;
pub mod ledger;
pub mod memory;
mod mesh;
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
mod usage;
pub mod wrap;

pub use digest::Digest;
pub use dtype::DType;
pub use error::Error;
pub use exact::ExactSum;
pub use failure::FailureKind;
pub use memory::Memory;
pub use mesh::{Axis, Group, Mesh};
pub use out_of_memory::{MemoryKind, OutOfMemory};
pub use rank::{Queue, Rank};
pub use run_clock::RunClock;
pub use scalars::Tallies;
