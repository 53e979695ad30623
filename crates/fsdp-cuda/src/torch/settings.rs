//! Loads libtorch's CUDA half, and lets its allocator share a device with the memories of this crate.

use super::error::{TorchError, message};
use crate::device;
use crate::ffi::torch_process as ffi;

/// Loads libtorch's CUDA half (`libtorch_cuda.so`, or a path), which is not linked: without it, tensors can only be on
/// the host. From then on, its allocator and the memories of this crate free unused memory for each other before a
/// device is full.
///
/// # Errors
/// [`TorchError::Cuda`] if it is not found, or libraries that it needs are not found.
pub fn load_cuda(library: &str) -> Result<(), TorchError> {
    let loaded = ffi::load_cuda(library).and_then(|()| ffi::on_memory_wanted(give_back));
    loaded.map_err(|error| TorchError::Cuda { library: library.to_owned(), what: message(error) })?;
    device::ask_when_full(empty_cache);
    Ok(())
}

/// If less than 1/8 of a device's memory is free, unused storage is freed when libtorch wants more. libtorch does not
/// say how much it wants, and asks before it knows whether the driver has it.
const SCARCE_PART: usize = 8;

/// Called by libtorch's allocator before it asks the driver for more memory of a device.
extern "C" fn give_back(device: i32) -> bool {
    let Ok(device) = usize::try_from(device) else { return false };
    device::is_scarce(device, SCARCE_PART) && device::give_back(device)
}

/// Called by a memory whose device is full. Does nothing unless the process uses a single device: libtorch waits for
/// all devices, and another one may be in a collective that waits for the calling rank.
fn empty_cache(device: usize) -> bool {
    if !device::is_only(device) {
        return false;
    }
    ffi::empty_cache().unwrap_or_else(|error| {
        tracing::debug!(%error, "libtorch's allocator could not free its cache");
        false
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::torch::folder;

    #[test]
    fn loading_cuda_library_links_both_allocators() {
        let library = folder().expect("the system knows what is loaded").join("libtorch_cuda.so");
        if !library.exists() {
            println!("skipped: {} is not there", library.display());
            return;
        }
        let library = library.display().to_string();
        match load_cuda(&library) {
            // Libraries that it needs may be missing where CUDA is not used.
            Err(error) if error.to_string().contains("cannot open shared object file") => {
                return println!("skipped: {error}");
            }
            loaded => loaded.unwrap_or_else(|error| panic!("{error}")),
        }
        load_cuda(&library).expect("again, which registers nothing twice");
        assert!(!empty_cache(0), "there is no device here, or nothing in its cache");
        assert!(!give_back(-1));
    }
}
