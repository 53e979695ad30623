//! Compute by libtorch: [`Torch`] is a memory that has addresses, with ATen's operations over views of its buffers.
//!
//! | device | memory |
//! |---|---|
//! | `torch-cpu` | [`HostMemory`](fsdp_nn::HostMemory) |
//! | `cuda` | [`CudaMemory`](crate::CudaMemory) |
//!
//! libtorch owns nothing that the memory's account counts: parameters, gradients, activations and statistics are in
//! buffers of the underlying memory, and tensors are only views of them. Temporaries of an operation come from
//! libtorch's allocator.
//!
//! Operations for which this project has a kernel (those of the underlying memory, update rules) use it;
//! [`Kernels::Aten`] composes them from ATen's operations, for comparison. Arithmetic is in the master dtype either
//! way, with two exceptions that keep products in the matrix units: attention rounds probabilities to the dtype of its
//! operands, and the head rounds the gradients of its logits.

mod backend;
mod cuda;
mod error;
mod host;
mod memory;
mod ops;
mod place;
mod settings;
mod storage;
mod threads;
mod update;

pub use crate::ffi::torch_process::{
    AllocatorBytes, allocator_bytes, reset_allocator_peaks, set_deterministic, start_cuda,
};
pub use error::TorchError;
pub(crate) use error::message;
pub use memory::{Kernels, Torch};
pub use ops::attention_kernels;
pub use place::{check_version, folder, library_folders, stated_version};
pub use settings::load_cuda;
pub use storage::TorchStorage;
pub use threads::set_intra_op;
