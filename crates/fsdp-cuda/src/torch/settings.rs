//! Settings of libtorch in the whole process, and what it says of itself.

use std::ffi::CString;

use super::error::{TorchError, of_process, without_trace};
use crate::device::{self, StreamHandle};
use crate::ffi::torch as ffi;
use fsdp_core::Error;

/// Makes libtorch use deterministic algorithms, and fail where an operation has none.
///
/// # Errors
/// [`Error::Device`] with libtorch's words.
pub fn set_deterministic(deterministic: bool) -> Result<(), Error> {
    ffi::set_deterministic(deterministic).map_err(|error| of_process("setting determinism", &error))
}

/// Loads libtorch's CUDA half (`libtorch_cuda.so`, or a path), which nothing links: without it there are only tensors of
/// the host. From then on its allocator and the memories of this crate give each other what they do not use of a device
/// before it is full.
///
/// # Errors
/// [`TorchError::Cuda`]: it is not there, or needs libraries that are not there.
pub fn load_cuda(library: &str) -> Result<(), TorchError> {
    let failed = |what: String| TorchError::Cuda { library: library.to_owned(), what };
    let name = CString::new(library).map_err(|error| failed(error.to_string()))?;
    ffi::load_cuda(&name).map_err(|error| failed(error.to_string()))?;
    ffi::on_memory_wanted(give_back).map_err(|error| failed(error.to_string()))?;
    device::ask_when_full(empty_cache);
    Ok(())
}

/// Makes libtorch's CUDA half look for the driver and its devices, so that a driver that is too old for it is known before
/// ranks start.
///
/// # Errors
/// [`TorchError::Driver`] with libtorch's words.
pub fn start_cuda() -> Result<(), TorchError> {
    ffi::start_cuda().map_err(|error| TorchError::Driver { what: without_trace(&error.to_string()) })
}

/// Of a device with less than this part of its memory free, unused storage is given back when libtorch wants more. It
/// does not say how much it wants, and asks before it knows whether the driver has it.
const SCARCE_PART: usize = 8;

/// What libtorch's allocator calls before it asks the driver for more of a device.
extern "C" fn give_back(device: i32) -> bool {
    let Ok(device) = usize::try_from(device) else { return false };
    device::is_scarce(device, SCARCE_PART) && device::give_back(device)
}

/// What a memory calls when its device is full. Only in a process of one device: libtorch waits for all of them, and
/// another may be in a collective that waits for the rank that asks.
fn empty_cache(device: usize) -> bool {
    if !device::is_only(device) {
        return false;
    }
    ffi::empty_cache().unwrap_or_else(|error| {
        tracing::debug!(%error, "libtorch's allocator gave nothing back");
        false
    })
}

/// Makes a stream of a device the one that libtorch's operations of this thread are enqueued on.
///
/// # Errors
/// [`Error::Device`]: [`load_cuda`] was not called, or there is no such device.
pub fn enter_stream(device: usize, stream: StreamHandle) -> Result<(), Error> {
    let device = i32::try_from(device).unwrap_or(i32::MAX);
    ffi::enter_stream(device, stream.as_ptr()).map_err(|error| of_process("entering a stream", &error))
}

/// What libtorch's caching allocator holds on a device, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocatorBytes {
    /// In tensors.
    pub allocated: u64,
    /// Taken from the device.
    pub reserved: u64,
    /// The most that was ever in tensors.
    pub allocated_peak: u64,
    /// The most that was ever taken from the device.
    pub reserved_peak: u64,
}

/// The caching allocator's figures for a CUDA device.
///
/// # Errors
/// [`Error::Device`]: [`load_cuda`] was not called, or there is no such device.
pub fn allocator_bytes(device: usize) -> Result<AllocatorBytes, Error> {
    let bytes = ffi::allocator_bytes(i32::try_from(device).unwrap_or(i32::MAX))
        .map_err(|error| of_process("reading the allocator's figures", &error))?;
    let [allocated, reserved, allocated_peak, reserved_peak] =
        bytes.map(|bytes| u64::try_from(bytes).unwrap_or_default());
    Ok(AllocatorBytes { allocated, reserved, allocated_peak, reserved_peak })
}

/// Forgets the peaks of [`allocator_bytes`]: what is taken now is the new peak.
///
/// # Errors
/// [`Error::Device`]: [`load_cuda`] was not called, or there is no such device.
pub fn reset_allocator_peaks(device: usize) -> Result<(), Error> {
    ffi::reset_allocator_peaks(i32::try_from(device).unwrap_or(i32::MAX))
        .map_err(|error| of_process("forgetting the allocator's peaks", &error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::torch::folder;

    #[test]
    fn both_allocators_know_each_other_once_the_cuda_half_is_loaded() {
        let library = folder().expect("the system knows what is loaded").join("libtorch_cuda.so");
        if !library.exists() {
            eprintln!("not checked: {} is not there", library.display());
            return;
        }
        let library = library.display().to_string();
        match load_cuda(&library) {
            // What it needs may be left away where nothing of CUDA runs.
            Err(error) if error.to_string().contains("cannot open shared object file") => {
                return eprintln!("not checked: {error}");
            }
            loaded => loaded.unwrap_or_else(|error| panic!("{error}")),
        }
        load_cuda(&library).expect("again, which registers nothing twice");
        assert!(!empty_cache(0), "there is no device here, or nothing in its cache");
        assert!(!give_back(-1));
    }
}
