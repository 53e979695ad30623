//! Ranks on devices: CUDA memory, kernels and NCCL, and compute by libtorch.
//!
//! | module | what |
//! |---|---|
//! | [`device`] | memory of one GPU: buffers, streams, copies; what NCCL needs to know of it |
//! | [`fused`] | operations that have a kernel of ours |
//! | [`error`] | failures of the driver, the device and the kernel compiler |

pub mod device;
pub mod error;
#[expect(unsafe_code, reason = "the one module of this crate that may")]
mod ffi;
pub mod fused;
mod kernels;

pub use device::{CudaBuffer, CudaMemory, CudaOptions, DeviceMemory};
pub use error::DeviceError;
pub use fused::FusedOps;
