//! Communicators over NCCL, for ranks that are threads of one or several processes, each with its own device.
//!
//! [`Nccl::open`] finds the library, [`Gpus`] starts the ranks, [`NcclComm`] is their communicator.
//!
//! # NCCL's rules, and how they are kept
//!
//! - *One call at a time on a communicator, and calls of one device from one thread* (user guide, "Thread Safety").
//!   Every rank issues its collectives from its own thread; a lock per communicator serializes them with the watcher's
//!   calls.
//! - *Several communicators on one device* (user guide, "Using multiple NCCL communicators concurrently"): kernels of
//!   two communicators may have to run at the same time on all their devices, so every rank must launch them in the
//!   same order. A rank has one communicator for gathers and one for reductions, and those of smaller groups split off
//!   from them; a split in which all ranks give the same color creates none, but shares the parent's. The schedule has
//!   one order of operations for all ranks, and a call here returns only when NCCL has launched it. So ranks must run
//!   in program order: adversarial orders that differ between ranks are for `fsdp-sim`.
//! - *Every rank of a communicator makes the same calls on it in the same order.* The table compares them over all
//!   groups that share the communicator ([`CommError::Order`](fsdp_core::comm::CommError::Order)).
//! - *Buffers are memory that the device can access* (user guide, "Data Pointers"): its own, or pinned host memory,
//!   which holds the shards under CPU offload when the first replica broadcasts what it has read.
//! - *No operation is outstanding when a communicator is split* (`ncclCommSplit`). Groups are created before the first
//!   step.
//! - *No call on a communicator that is not ready* (non-blocking communicators). The first collective of a communicator
//!   sets up its connections, and waits for all ranks meanwhile.
//! - *Nothing may free memory that the device still uses.* Buffers of a collective that was not waited for, or that
//!   failed, are leaked.
//!
//! # Failures, and how they are detected
//!
//! Every call is first entered into a table shared by all ranks of a process, and compared with the other ranks' calls
//! at this position: a difference is [`CommError::Mismatch`](fsdp_core::comm::CommError::Mismatch) before NCCL sees it,
//! because NCCL would hang or add up the wrong numbers. A watcher polls NCCL's asynchronous errors and the ends of
//! collectives; when something fails or takes too long, all communicators of the process are aborted, and every later
//! call returns the first error. Other processes learn of it through their alarm. Differences between processes are
//! found by the reports that the leader compares every second; NCCL may hang meanwhile. An aborted collective leaves
//! wrong numbers behind, so code that reads results on the host must call [`Comm::check`](fsdp_core::comm::Comm::check)
//! afterwards.

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
