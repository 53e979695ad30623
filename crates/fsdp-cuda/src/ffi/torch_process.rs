//! Process-wide settings and state of libtorch, through the shim: determinism, its CUDA half, and the CUDA allocator.

use std::ffi::{CString, c_char, c_void};

use fsdp_core::Error;
use tch::TchError;

use super::torch::{ErrorText, check};
use crate::device::StreamHandle;
use crate::torch::{TorchError, message};

unsafe extern "C" {
    fn fsdp_torch_set_deterministic(deterministic: bool) -> ErrorText;
    fn fsdp_torch_load_cuda(library: *const c_char) -> ErrorText;
    fn fsdp_torch_start_cuda() -> ErrorText;
    fn fsdp_torch_enter_stream(device: i32, stream: *mut c_void) -> ErrorText;
    fn fsdp_torch_allocator_bytes(device: i32, bytes: *mut i64) -> ErrorText;
    fn fsdp_torch_reset_allocator_peaks(device: i32) -> ErrorText;
    fn fsdp_torch_empty_cache(had_any: *mut bool) -> ErrorText;
    fn fsdp_torch_on_memory_wanted(give_back: extern "C" fn(i32) -> bool) -> ErrorText;
}

/// The result of a call that a run depends on.
fn check_operation(operation: &'static str, text: ErrorText) -> Result<(), Error> {
    let failed = |error| Error::Device(Box::new(TorchError::Operation { operation, what: message(error) }));
    check(text).map_err(failed)
}

/// Converts a device number; libtorch reports a number that is out of range as a missing device.
fn number(device: usize) -> i32 {
    i32::try_from(device).unwrap_or(i32::MAX)
}

/// Sets whether libtorch must use deterministic algorithms; operations without one then fail.
///
/// # Errors
/// [`Error::Device`] with libtorch's message.
pub fn set_deterministic(deterministic: bool) -> Result<(), Error> {
    // SAFETY: takes no pointer.
    check_operation("setting determinism", unsafe { fsdp_torch_set_deterministic(deterministic) })
}

/// Loads libtorch's CUDA half.
///
/// # Errors
/// [`TchError`] if it is not found or cannot be loaded.
pub(crate) fn load_cuda(library: &str) -> Result<(), TchError> {
    let library = CString::new(library)?;
    // SAFETY: the string is zero-terminated.
    check(unsafe { fsdp_torch_load_cuda(library.as_ptr()) })
}

/// Initializes libtorch's CUDA half, so that a driver that is too old for it is detected before ranks start.
///
/// # Errors
/// [`TorchError::Driver`] with libtorch's message: its CUDA half is not loaded, the driver is missing or unusable, or
/// there is no device.
pub fn start_cuda() -> Result<(), TorchError> {
    // SAFETY: takes no pointer.
    check(unsafe { fsdp_torch_start_cuda() }).map_err(|error| TorchError::Driver { what: message(error) })
}

/// Makes libtorch enqueue this thread's operations on a stream of a device.
///
/// # Errors
/// [`Error::Device`] if libtorch's CUDA half is not loaded, or there is no such device.
pub(crate) fn enter_stream(device: usize, stream: StreamHandle) -> Result<(), Error> {
    // SAFETY: libtorch only stores the handle; the stream lives as long as the memory that it belongs to, whose thread
    // this is.
    check_operation("entering a stream", unsafe { fsdp_torch_enter_stream(number(device), stream.as_ptr()) })
}

/// Usage of libtorch's caching allocator on a device, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocatorBytes {
    /// Bytes in tensors.
    pub allocated: u64,
    /// Peak bytes in tensors.
    pub allocated_peak: u64,
    /// Peak bytes reserved from the device.
    pub reserved_peak: u64,
}

/// Returns the caching allocator's usage of a CUDA device.
///
/// # Errors
/// [`Error::Device`] if libtorch's CUDA half is not loaded, or there is no such device.
pub fn allocator_bytes(device: usize) -> Result<AllocatorBytes, Error> {
    let mut bytes = [0; 4];
    // SAFETY: the shim writes four numbers.
    let text = unsafe { fsdp_torch_allocator_bytes(number(device), bytes.as_mut_ptr()) };
    check_operation("reading the allocator's figures", text)?;
    let [allocated, _, allocated_peak, reserved_peak] =
        bytes.map(|bytes| u64::try_from(bytes).unwrap_or_default());
    Ok(AllocatorBytes { allocated, allocated_peak, reserved_peak })
}

/// Resets the peaks of [`allocator_bytes`] to the present usage.
///
/// # Errors
/// [`Error::Device`] if libtorch's CUDA half is not loaded, or there is no such device.
pub fn reset_allocator_peaks(device: usize) -> Result<(), Error> {
    // SAFETY: no pointers.
    let text = unsafe { fsdp_torch_reset_allocator_peaks(number(device)) };
    check_operation("resetting the allocator's peaks", text)
}

/// Makes libtorch's allocator return its cached memory of all CUDA devices to the driver; returns whether the current
/// device had any.
///
/// # Errors
/// [`TchError`] if libtorch's CUDA half is not loaded.
pub(crate) fn empty_cache() -> Result<bool, TchError> {
    let mut had_any = false;
    // SAFETY: the pointer is to a flag that outlives the call.
    check(unsafe { fsdp_torch_empty_cache(&raw mut had_any) })?;
    Ok(had_any)
}

/// From now on, libtorch's allocator calls `give_back` with the number of a CUDA device before it asks the driver for
/// more of its memory. The callback may return memory to the driver, and must not use libtorch.
///
/// # Errors
/// [`TchError`] if libtorch's CUDA half is not loaded.
pub(crate) fn on_memory_wanted(give_back: extern "C" fn(i32) -> bool) -> Result<(), TchError> {
    // SAFETY: the function lives as long as the process, and cannot unwind into C++.
    check(unsafe { fsdp_torch_on_memory_wanted(give_back) })
}
