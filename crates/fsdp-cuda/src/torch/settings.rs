//! libtorch's CUDA half, and how its allocator and the memories of this crate share a device.

use super::error::{TorchError, words};
use crate::device;
use crate::ffi::torch_process as ffi;

/// Loads libtorch's CUDA half (`libtorch_cuda.so`, or a path), which nothing links: without it there are only tensors of
/// the host. From then on its allocator and the memories of this crate give each other what they do not use of a device
/// before it is full.
///
/// # Errors
/// [`TorchError::Cuda`]: it is not there, or needs libraries that are not there.
pub fn load_cuda(library: &str) -> Result<(), TorchError> {
    let loaded = ffi::load_cuda(library).and_then(|()| ffi::on_memory_wanted(give_back));
    loaded.map_err(|error| TorchError::Cuda { library: library.to_owned(), what: words(error) })?;
    device::ask_when_full(empty_cache);
    Ok(())
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
