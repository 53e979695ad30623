//! All unsafe code of this crate: calls of foreign libraries, wrapped so that callers can not misuse them.
//!
//! | module | library |
//! |---|---|
//! | [`driver_library`], [`driver`], [`streams`] | libcuda: what is installed; devices and their memory; streams, events, copies and launches |
//! | [`nvrtc`] | libnvrtc: kernels compiled at run time |
//! | [`library`], [`versions`] | any of them: opened by name or folder; what they say of themselves |
//! | [`nccl`], [`nccl_comm`] | libnccl: communicators and collectives |
//! | `torch`, `torch_process` | libtorch, through the shim: operations, and tensors over memory of ours; what concerns the process |
//!
//! Every unsafe block says which facts it relies on, and who checked them.

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
