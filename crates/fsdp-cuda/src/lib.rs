//! Ranks on GPUs: CUDA memory, kernels and NCCL, and compute by libtorch.
//!
//! This crate is a part of [`fsdp`](https://docs.rs/fsdp), without a promise of stability: any version may change it.
//!
//! | module | contents |
//! |---|---|
//! | [`device`] | memory of one GPU: buffers, streams, copies, operations with own kernels; the interface for NCCL |
//! | [`nccl`] | a communicator over NCCL, its watcher, and a launcher of one rank per GPU |
//! | [`library`] | shared libraries, opened on first use |
//! | [`libtorch`] | its version, and the one of an installed libtorch |
//! | [`doctor`] | a diagnosis of what this machine provides |
#![cfg_attr(
    feature = "torch",
    doc = "| [`torch`] | compute by libtorch over any memory that has addresses |"
)]
//! | [`error`] | errors of the driver, the device and the kernel compiler |

pub mod device;
pub mod doctor;
pub mod error;
#[expect(unsafe_code, reason = "the one module of this crate that may")]
mod ffi;
mod kernels;
pub mod libtorch;
pub mod nccl;
#[cfg(feature = "torch")]
pub mod torch;
mod update;

pub use device::{CudaBuffer, CudaMemory, CudaOptions, DeviceMemory, TimedEvent};
pub use error::DeviceError;
pub use ffi::library;
pub use ffi::nvrtc::load_compiler;
