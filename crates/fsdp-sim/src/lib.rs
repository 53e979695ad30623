//! Ranks as threads: in-process worlds, the simulated communicator, faults and adversarial orders.
//!
//! Start with [`World::run`]: it starts one thread per rank and hands each a [`RankContext`], whose
//! [`comm`](RankContext::comm) is a [`SimComm`] over all ranks behind the checks of
//! [`fsdp_core::comm::Comm`]. What a cluster does by hanging, this crate reports: [`WorldError`] names the
//! first rank that failed, [`Fault`] makes a rank fail on purpose, [`SeededOrder`] picks adversarial orders.
//!
//! The ranks share an address space and nothing else: there are no wires, no latencies and no simulated
//! time here.
#![forbid(unsafe_code)]

mod world;

mod comm;
mod exchange;

mod board;
mod failure;
mod meetings;

mod fault;
mod launch;
mod order;

pub use comm::SimComm;
pub use failure::{RankFailure, WorldError};
pub use fault::{Action, Fault};
pub use launch::Threads;
pub use order::SeededOrder;
pub use world::{RankContext, World, WorldOptions};
