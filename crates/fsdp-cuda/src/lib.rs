//! Ranks on devices: CUDA memory, kernels and NCCL, and compute by libtorch.
//!
//! | module | what |
//! |---|---|
//! | [`device`] | memory of one GPU: buffers, streams, copies, operations that have a kernel of ours; what NCCL needs to know of it |
//! | [`nccl`] | a communicator over NCCL, who watches it, and a launcher of one rank per GPU |
//! | [`library`] | shared libraries, opened when they are needed |
//! | [`doctor`] | what this machine has of all that |
#![cfg_attr(
    feature = "torch",
    doc = "| [`torch`] | compute by libtorch over any memory that has addresses |"
)]
//! | [`error`] | failures of the driver, the device and the kernel compiler |

pub mod device;
pub mod doctor;
pub mod error;
#[expect(unsafe_code, reason = "the one module of this crate that may")]
mod ffi;
mod kernels;
pub mod nccl;
#[cfg(feature = "torch")]
pub mod torch;
mod update;

pub use device::{CudaBuffer, CudaMemory, CudaOptions, DeviceMemory, TimedEvent};
pub use error::DeviceError;
pub use ffi::library;
pub use ffi::nvrtc::load_compiler;
