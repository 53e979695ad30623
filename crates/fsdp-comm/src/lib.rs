//! What communicators share: how ranks are launched, collective algorithms over links, and the conformance
//! suite.
//!
//! - [`launch`]: what a trainer asks of whoever starts its ranks.
//! - [`assembly`]: what ranks tell each other beside collectives.
//! - [`process`]: worlds of several processes.
//! - [`conformance`]: what every implementation of [`Communicator`](fsdp_core::comm::Communicator) must do,
//!   as plain functions over a [`Launcher`](launch::Launcher).
//! - [`Link`]: messages between pairs of ranks; [`InMemoryLinks`] between ranks of one process.
//! - [`algorithms`]: all-gather, reduce-scatter, all-reduce and broadcast of bytes over a link.
//! - [`LinkComm`]: a communicator made of these, for any memory.
#![forbid(unsafe_code)]

pub mod assembly;
pub mod conformance;
pub mod launch;
pub mod process;

mod link;

mod in_memory;
mod session;

pub mod algorithms;
mod sums;

mod flight;
mod link_comm;
mod near;
mod staging;
mod tcp;

mod bf16;

pub use flight::{CallNumber, FlightRecorder};
pub use in_memory::InMemoryLinks;
pub use link::{Alarm, Exchanged, Header, Incoming, Link, Outgoing};
pub use link_comm::LinkComm;
pub use near::{MakeLink, near_links};
pub use session::{Session, decode as call_of, encode as header_of};
pub use tcp::{TcpDoor, TcpLinks, TcpWorld};
