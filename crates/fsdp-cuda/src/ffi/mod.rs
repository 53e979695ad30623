//! The unsafe code of this crate: calls of foreign libraries, wrapped so that callers cannot misuse them.
//!
//! | module | library |
//! |---|---|
//! | [`driver_library`], [`driver`], [`streams`] | libcuda: installation; devices, memory; streams, events, launches |
//! | [`nvrtc`] | libnvrtc: kernels compiled at run time |
//! | [`library`], [`versions`] | all libraries: opening by name or folder; reported versions |
//! | [`nccl`], [`nccl_comm`] | libnccl: communicators and collectives |
//! | `torch`, `torch_process` | libtorch, through the shim: operations and tensors; process-wide settings |
//!
//! Every unsafe block states the facts it relies on, and where they were checked.

pub(crate) mod driver;
pub(crate) mod driver_library;
pub mod library;
pub(crate) mod nccl;
pub(crate) mod nccl_comm;
pub(crate) mod nvrtc;
pub(crate) mod streams;
#[cfg(feature = "torch")]
pub(crate) mod torch;
#[cfg(feature = "torch")]
pub(crate) mod torch_process;
pub(crate) mod versions;
