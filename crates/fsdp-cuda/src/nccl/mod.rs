//! Communicators over NCCL, for ranks that are threads of one process or of several, each with a device of its own.
//!
//! [`Nccl::open`] finds the library, [`Gpus`] starts the ranks, [`NcclComm`] is what they communicate with.
//!
//! # Rules of NCCL that this keeps
//!
//! - *One call at a time on a communicator, and calls of one device from one thread* (user guide, "Thread Safety"). Every
//!   rank issues its collectives from its own thread; a lock per communicator keeps the watcher's calls apart.
//! - *Several communicators on one device* (user guide, "Using multiple NCCL communicators concurrently"): kernels of two
//!   communicators may have to run at the same time on all their devices, so every rank must launch them in the same
//!   order. A rank has one communicator for gathers and one for reductions, and those of smaller groups that are split off
//!   from them; a split in which all ranks give the same color makes no new one, but shares the parent's. The schedule
//!   has one order of operations for all ranks, and a call here returns only when NCCL has launched it. So ranks must
//!   run in program order: an adversarial order that differs between ranks is for `fsdp-sim`.
//! - *Every rank of a communicator makes the same calls on it in the same order.* The table compares them over all groups
//!   that share it ([`CommError::Order`](fsdp_core::comm::CommError::Order)).
//! - *Buffers are memory that the device can reach* (user guide, "Data Pointers"): its own, or pinned memory of the host,
//!   where shards live under CPU offload when the first replica sends what it has read.
//! - *No operation is outstanding when a communicator is split* (`ncclCommSplit`). Groups are made before the first step.
//! - *No call on a communicator that is not ready* (non-blocking communicators). The first collective of a communicator
//!   sets up its connections, and waits for all ranks while it does.
//! - *Nothing may free what the device still uses.* Buffers of a collective that nobody waited for, or that failed, are
//!   leaked.
//!
//! # What goes wrong, and who says so
//!
//! Every call is first entered into a table that all ranks of a process share, and compared with what the others called
//! at this place: a difference is [`CommError::Mismatch`](fsdp_core::comm::CommError::Mismatch) before NCCL sees it,
//! because NCCL would hang or add up the wrong numbers. A watcher polls NCCL's asynchronous errors and the ends of
//! collectives; when something fails or takes too long, all communicators of the process are aborted, and every later
//! call returns the first reason. Other processes hear of it by their alarm. What only differs between processes is
//! found by the reports that the leader compares every second: NCCL may hang on it meanwhile. A collective that was cut
//! off leaves wrong numbers behind: whoever reads results on the host calls
//! [`Comm::check`](fsdp_core::comm::Comm::check) afterwards.

mod launch;

mod comm;

pub(crate) mod buffers;
mod connection;
mod error;
mod link;
mod remote;
mod watch;
mod world;

pub use crate::ffi::nccl::Nccl;
pub use comm::NcclComm;
pub use error::{Code, NcclError, Version};
pub use launch::{GpuOptions, Gpus};
pub use remote::Peers;
