//! Shared parts of the communicators: launching ranks, rendezvous, collective algorithms over links, and the
//! conformance suite.
//!
//! This crate is a part of [`fsdp`](https://docs.rs/fsdp), without a promise of stability: any version may change it.
//!
//! - [`launch`]: the contract between a trainer and its launcher.
//! - [`ranks`]: how launchers run the ranks of their process, each on a thread.
//! - [`rendezvous`]: where the calls of ranks of one process meet, for every communicator between threads.
//! - [`assembly`]: what ranks communicate besides collectives.
//! - [`auth`]: the proof at both ends of a connection that the other one belongs to the run.
//! - [`process`]: worlds of several processes.
//! - [`conformance`]: the requirements on every implementation of [`Communicator`](fsdp_core::comm::Communicator), as
//!   plain functions over a [`Launcher`](launch::Launcher).
//! - [`Link`]: messages between pairs of ranks; [`InMemoryLinks`] between ranks of one process.
//! - [`LinkComm`]: a communicator over links, for any memory; `algorithms.rs` implements all-gather, reduce-scatter,
//!   all-reduce and broadcast of bytes over a link.
#![forbid(unsafe_code)]

pub mod assembly;
pub mod auth;
pub mod conformance;
pub mod launch;
pub mod process;
pub mod ranks;
pub mod rendezvous;

mod link;

mod in_memory;
mod session;

mod algorithms;
mod sums;

mod flight;
mod link_comm;
mod near;
mod staging;
mod tcp;

mod monitor;

pub use flight::{CallNumber, FlightRecorder};
pub use in_memory::InMemoryLinks;
pub use link::{Alarm, Exchanged, Header, Incoming, Link, Outgoing, place, scatter};
pub use link_comm::LinkComm;
pub use near::{MakeLink, local_links};
pub use tcp::{TcpAcceptor, TcpLinks, TcpWorld};
