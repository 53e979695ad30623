//! What can go wrong between us and a device: each error says which call failed and what to do about it.

use std::path::PathBuf;

use fsdp_core::Error;
use fsdp_core::memory::Category;

use crate::device::full;
use crate::ffi::driver_library::CudaVersion;
use crate::ffi::library::LibraryError;

/// A failure of the driver, of the kernel compiler, or of the device itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The driver is not there.
    #[error(
        "the NVIDIA driver (libcuda) was not found (tried {}); a GPU needs the NVIDIA driver: install it, or run with \
         another device, or add its folder to LD_LIBRARY_PATH",
        tried.join(", ")
    )]
    NoDriver {
        /// The names that were given to the loader.
        tried: Vec<String>,
    },
    /// The compiler of kernels is not there, or is not what it is named.
    #[error(transparent)]
    Compiler(#[from] LibraryError),
    /// The driver lacks a function, whatever it says of its version.
    #[error(
        "{} has no function {function}: it is not the NVIDIA driver for {} or newer; install that, or remove this file \
         from where the loader looks",
        path.display(), CudaVersion::NEEDED
    )]
    NoFunction {
        /// The file that was opened.
        path: PathBuf,
        /// What it lacks.
        function: &'static str,
    },
    /// The driver does not know functions that are needed.
    #[error("the NVIDIA driver supports {found}, but {} is needed; update the driver", CudaVersion::NEEDED)]
    OldDriver {
        /// What it supports.
        found: CudaVersion,
    },
    /// There is no such device.
    #[error(
        "there is no GPU {device}: the driver shows {count}; {}check nvidia-smi and CUDA_VISIBLE_DEVICES",
        if *count > 0 { "use fewer ranks, or " } else { "" }
    )]
    NoDevice {
        /// The number that was asked for, from 0.
        device: usize,
        /// How many there are.
        count: usize,
    },
    /// The device is full.
    #[error("{bytes} bytes of device memory can not be had: {free} of {total} bytes are free")]
    OutOfMemory {
        /// What was asked for.
        bytes: usize,
        /// Free on the device.
        free: usize,
        /// In all.
        total: usize,
    },
    /// The driver can not pin so much memory of the host.
    #[error("{bytes} bytes of pinned memory of the host can not be had")]
    OutOfPinnedMemory {
        /// What was asked for.
        bytes: usize,
    },
    /// A call of the driver failed.
    #[error("{call} failed on GPU {device}: {code} ({what}){}", remedy(code))]
    Call {
        /// The function.
        call: &'static str,
        /// The device.
        device: usize,
        /// The name of the error.
        code: String,
        /// The driver's words for it.
        what: String,
    },
    /// A kernel of ours was not accepted by the compiler.
    #[error("kernels of `{file}` do not compile for {arch}: {log}")]
    Compile {
        /// The source.
        file: String,
        /// For what.
        arch: String,
        /// What the compiler said.
        log: String,
    },
}

/// What to do about the errors that a user can mend.
fn remedy(code: &str) -> &'static str {
    match code {
        "CUDA_ERROR_ILLEGAL_ADDRESS" | "CUDA_ERROR_LAUNCH_FAILED" | "CUDA_ERROR_MISALIGNED_ADDRESS" => {
            "; the device is unusable for this process from now on: start again from the last checkpoint"
        }
        "CUDA_ERROR_OUT_OF_MEMORY" => {
            "; the device or the host has no room for what the driver needs itself: see nvidia-smi for other processes, or \
             take a smaller micro-batch, activation checkpointing, more ranks or offload shards"
        }
        "CUDA_ERROR_ECC_UNCORRECTABLE" => "; the memory of the GPU is faulty: reset it or use another one",
        "CUDA_ERROR_NO_BINARY_FOR_GPU" | "CUDA_ERROR_INVALID_PTX" => {
            "; the kernel compiler (libnvrtc) and the driver do not fit: install libnvrtc of the driver's version"
        }
        "CUDA_ERROR_DEVICE_UNAVAILABLE" | "CUDA_ERROR_DEVICES_UNAVAILABLE" => {
            "; another process has the GPU for itself: see nvidia-smi"
        }
        _ => "",
    }
}

impl From<DeviceError> for Error {
    fn from(error: DeviceError) -> Self {
        // Buffers have their category told; what else needs room is temporary.
        full::explain(error, Category::Workspace, None)
    }
}
