//! XLA devices: a step is one compiled program, run on any device that has a [PJRT] plugin (TPUs, GPUs, CPUs).
//!
//! This crate is a part of [`fsdp`](https://docs.rs/fsdp), without a promise of stability: any version may change it.
//!
//! The engine runs unchanged on top of a memory that traces instead of computing ([`XlaMemory`]): each operation of a
//! schedule, and each operation within a block, is lowered to StableHLO by one rule per kind (`ops`). When the schedule
//! ends, the program is compiled, or taken from those already compiled, and runs on the devices of all ranks: one
//! replica each. Everything that differs between ranks is an argument: data, dropout keys, row tables.
//!
//! [`Devices`] is the launcher. Nothing is needed at build time; the plugin, a shared library, is opened at run time.
//!
//! [PJRT]: https://openxla.org/xla/pjrt

mod ahead;
mod announcement;
mod arithmetic;
mod assignment;
mod buffer;
mod cache;
mod comm;
mod error;
mod ffi;
mod flags;
mod gpu;
mod hlo;
mod launch;
mod memory;
mod ops;
mod optimized;
mod order;
mod program_event;
mod scalars;
mod store;
mod trace;
mod update;
mod world;

#[cfg(test)]
mod tests;

pub use ahead::{CompileReport, Target, Tracer};
pub use buffer::XlaBuffer;
pub use comm::Reduction;
pub use error::XlaError;
pub use ffi::{MemoryNeed, Setting};
pub use hlo::Collective;
pub use launch::{
    Devices, PluginReport, PluginVersions, ProgramForm, ProgramOptions, inspect, is_for_gpus, versions,
};
pub use memory::{TraceEvent, XlaMemory};
pub use optimized::Optimized;
pub use order::Order;
pub use program_event::{Listener, ProgramEvent};
pub use trace::Program;
