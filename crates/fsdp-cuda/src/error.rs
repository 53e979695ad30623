//! Device errors: each names the call that failed and what to do about it.

use std::path::PathBuf;

use fsdp_core::Error;
use fsdp_core::memory::Category;

use crate::device::full;
use crate::ffi::driver_library::CudaVersion;
use crate::ffi::library::LibraryError;

/// An error of the driver, the kernel compiler, or the device itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The driver was not found.
    #[error(
        "the NVIDIA driver (libcuda) was not found (tried {}); a GPU needs the NVIDIA driver: install it, or run with \
         another device, or add its folder to LD_LIBRARY_PATH",
        tried.join(", ")
    )]
    NoDriver {
        /// The names passed to the loader.
        tried: Vec<String>,
    },
    /// The kernel compiler was not found, or the file is another library.
    #[error(transparent)]
    Compiler(#[from] LibraryError),
    /// The driver lacks a required function, whatever version it reports.
    #[error(
        "{} has no function {function}: it is not the NVIDIA driver for {} or newer; install that, or remove this file \
         from the loader's search path",
        path.display(), CudaVersion::NEEDED
    )]
    NoFunction {
        /// The file that was opened.
        path: PathBuf,
        /// The missing function.
        function: &'static str,
    },
    /// The driver's version is too old.
    #[error("the NVIDIA driver supports {found}, but {} is needed; update the driver", CudaVersion::NEEDED)]
    OldDriver {
        /// The CUDA version that it supports.
        found: CudaVersion,
    },
    /// There is no such device.
    #[error(
        "there is no GPU {device}: the driver shows {count}; {}check nvidia-smi and CUDA_VISIBLE_DEVICES",
        if *count > 0 { "use fewer ranks, or " } else { "" }
    )]
    NoDevice {
        /// The requested number, from 0.
        device: usize,
        /// Number of visible devices.
        count: usize,
    },
    /// The device is full.
    #[error("cannot allocate {bytes} bytes of device memory: {free} of {total} bytes are free")]
    OutOfMemory {
        /// Requested bytes.
        bytes: usize,
        /// Free bytes of the device.
        free: usize,
        /// Total bytes of the device.
        total: usize,
    },
    /// The driver cannot pin that much host memory.
    #[error("cannot allocate {bytes} bytes of pinned host memory")]
    OutOfPinnedMemory {
        /// Requested bytes.
        bytes: usize,
    },
    /// A driver call failed.
    #[error("{call} failed on GPU {device}: {code} ({what}){}", remedy(code))]
    Call {
        /// The function.
        call: &'static str,
        /// The device.
        device: usize,
        /// The name of the error code.
        code: String,
        /// The driver's description of it.
        what: String,
    },
    /// The compiler rejected one of this crate's kernels.
    #[error("kernels of `{file}` do not compile for {arch}: {log}")]
    Compile {
        /// The source.
        file: String,
        /// The target architecture.
        arch: String,
        /// The compiler's output.
        log: String,
    },
}

/// Advice for errors that a user can fix.
fn remedy(code: &str) -> &'static str {
    match code {
        "CUDA_ERROR_ILLEGAL_ADDRESS" | "CUDA_ERROR_LAUNCH_FAILED" | "CUDA_ERROR_MISALIGNED_ADDRESS" => {
            "; this process can no longer use the device: restart from the last checkpoint"
        }
        "CUDA_ERROR_OUT_OF_MEMORY" => {
            "; the device or the host has too little memory for the driver itself: check nvidia-smi for other processes, \
             or use a smaller micro-batch, activation checkpointing, more ranks or offloaded shards"
        }
        "CUDA_ERROR_ECC_UNCORRECTABLE" => "; the GPU's memory is faulty: reset the GPU or use another one",
        "CUDA_ERROR_NO_BINARY_FOR_GPU" | "CUDA_ERROR_INVALID_PTX" => {
            "; the kernel compiler (libnvrtc) and the driver do not match: install libnvrtc of the driver's version"
        }
        "CUDA_ERROR_DEVICE_UNAVAILABLE" | "CUDA_ERROR_DEVICES_UNAVAILABLE" => {
            "; another process has exclusive use of the GPU: check nvidia-smi"
        }
        _ => "",
    }
}

impl From<DeviceError> for Error {
    fn from(error: DeviceError) -> Self {
        // Buffers report their category; all other allocations are temporary.
        full::allocation_error(error, Category::Workspace, None)
    }
}
