//! What the shim sets and reads of libtorch in the whole process: determinism, its CUDA half and that one's allocator.

use std::ffi::{CString, c_char, c_void};

use fsdp_core::Error;
use tch::TchError;

use super::torch::{Text, outcome};
use crate::device::StreamHandle;
use crate::torch::{TorchError, words};

unsafe extern "C" {
    fn fsdp_torch_set_deterministic(deterministic: bool) -> Text;
    fn fsdp_torch_load_cuda(library: *const c_char) -> Text;
    fn fsdp_torch_start_cuda() -> Text;
    fn fsdp_torch_enter_stream(device: i32, stream: *mut c_void) -> Text;
    fn fsdp_torch_allocator_bytes(device: i32, bytes: *mut i64) -> Text;
    fn fsdp_torch_reset_allocator_peaks(device: i32) -> Text;
    fn fsdp_torch_empty_cache(had_any: *mut bool) -> Text;
    fn fsdp_torch_on_memory_wanted(give_back: extern "C" fn(i32) -> bool) -> Text;
}

/// The result of a call that a run can not do without.
fn needed(operation: &'static str, text: Text) -> Result<(), Error> {
    let failed = |error| Error::Device(Box::new(TorchError::Operation { operation, what: words(error) }));
    outcome(text).map_err(failed)
}

/// libtorch has no device of a number that does not fit, and says so.
fn number(device: usize) -> i32 {
    i32::try_from(device).unwrap_or(i32::MAX)
}

/// Makes libtorch use deterministic algorithms, and fail where an operation has none.
///
/// # Errors
/// [`Error::Device`] with libtorch's words.
pub fn set_deterministic(deterministic: bool) -> Result<(), Error> {
    // SAFETY: takes no pointer.
    needed("setting determinism", unsafe { fsdp_torch_set_deterministic(deterministic) })
}

/// Loads libtorch's CUDA half.
///
/// # Errors
/// [`TchError`]: it is not there, or not loadable.
pub(crate) fn load_cuda(library: &str) -> Result<(), TchError> {
    let library = CString::new(library)?;
    // SAFETY: a string with a zero at its end.
    outcome(unsafe { fsdp_torch_load_cuda(library.as_ptr()) })
}

/// Makes libtorch's CUDA half look for the driver and its devices, so that a driver that is too old for it is known before
/// ranks start.
///
/// # Errors
/// [`TorchError::Driver`] with libtorch's words: it is not loaded, or there is no driver that it can use, or no device.
pub fn start_cuda() -> Result<(), TorchError> {
    // SAFETY: takes no pointer.
    outcome(unsafe { fsdp_torch_start_cuda() }).map_err(|error| TorchError::Driver { what: words(error) })
}

/// Makes a stream of a device the one that libtorch's operations of this thread are enqueued on.
///
/// # Errors
/// [`Error::Device`]: libtorch's CUDA half is not loaded, or there is no such device.
pub(crate) fn enter_stream(device: usize, stream: StreamHandle) -> Result<(), Error> {
    // SAFETY: libtorch only keeps the handle; who owns the stream keeps it for as long as the memory that it belongs
    // to, whose thread this is.
    needed("entering a stream", unsafe { fsdp_torch_enter_stream(number(device), stream.as_ptr()) })
}

/// What libtorch's caching allocator holds on a device, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocatorBytes {
    /// In tensors.
    pub allocated: u64,
    /// The most that was ever in tensors.
    pub allocated_peak: u64,
    /// The most that was ever taken from the device.
    pub reserved_peak: u64,
}

/// The caching allocator's figures for a CUDA device.
///
/// # Errors
/// [`Error::Device`]: libtorch's CUDA half is not loaded, or there is no such device.
pub fn allocator_bytes(device: usize) -> Result<AllocatorBytes, Error> {
    let mut bytes = [0; 4];
    // SAFETY: the shim writes four numbers.
    let text = unsafe { fsdp_torch_allocator_bytes(number(device), bytes.as_mut_ptr()) };
    needed("reading the allocator's figures", text)?;
    let [allocated, _, allocated_peak, reserved_peak] =
        bytes.map(|bytes| u64::try_from(bytes).unwrap_or_default());
    Ok(AllocatorBytes { allocated, allocated_peak, reserved_peak })
}

/// Forgets the peaks of [`allocator_bytes`]: what is taken now is the new peak.
///
/// # Errors
/// [`Error::Device`]: libtorch's CUDA half is not loaded, or there is no such device.
pub fn reset_allocator_peaks(device: usize) -> Result<(), Error> {
    // SAFETY: no pointers.
    let text = unsafe { fsdp_torch_reset_allocator_peaks(number(device)) };
    needed("forgetting the allocator's peaks", text)
}

/// Makes libtorch's allocator give the driver what it caches of CUDA devices; returns whether there was anything.
///
/// # Errors
/// [`TchError`] from libtorch: its CUDA half is not loaded.
pub(crate) fn empty_cache() -> Result<bool, TchError> {
    let mut had_any = false;
    // SAFETY: a pointer to a flag that outlives the call.
    outcome(unsafe { fsdp_torch_empty_cache(&raw mut had_any) })?;
    Ok(had_any)
}

/// From now on libtorch's allocator calls `give_back` with the number of a CUDA device before it asks the driver for more
/// of it; it may give memory to the driver, and must not use libtorch.
///
/// # Errors
/// [`TchError`]: libtorch's CUDA half is not loaded.
pub(crate) fn on_memory_wanted(give_back: extern "C" fn(i32) -> bool) -> Result<(), TchError> {
    // SAFETY: a function that lives as long as the process, and can not unwind into C++.
    outcome(unsafe { fsdp_torch_on_memory_wanted(give_back) })
}
