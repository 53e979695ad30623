//! The interface for libraries that work directly on device memory (NCCL).

use std::ffi::c_void;

use fsdp_core::memory::{Memory, Slice, SliceMut};
use fsdp_core::{Error, Queue};

/// A memory whose buffers have device addresses, and whose queues are streams on which others can enqueue work.
pub trait DeviceMemory: Memory {
    /// Returns the address of a range, for work on `queue` that reads it: later work on the queue is ordered after the
    /// previous users of the storage. The address is valid until the buffer is released or dropped.
    ///
    /// # Errors
    /// [`Error::Released`] if the buffer has no contents.
    fn pointer(&self, queue: Queue, slice: Slice<'_, Self::Buffer>) -> Result<u64, Error>;

    /// Like [`DeviceMemory::pointer`], for writing; the buffer allocates storage if it has none.
    ///
    /// # Errors
    /// [`Error::Shared`] if the storage has other handles; [`Error::OutOfMemory`].
    fn pointer_mut(&self, queue: Queue, slice: SliceMut<'_, Self::Buffer>) -> Result<u64, Error>;

    /// The stream of a queue, valid as long as the memory lives.
    fn stream(&self, queue: Queue) -> StreamHandle;

    /// Makes the device the current device of the calling thread.
    ///
    /// # Errors
    /// [`Error::Device`] if the device has failed.
    fn bind(&self) -> Result<(), Error>;

    /// Whether the device has reached an event in a queue; callable from any thread, after [`DeviceMemory::bind`].
    ///
    /// # Errors
    /// [`Error::Device`] if the device has failed.
    fn is_complete(&self, event: &Self::Event) -> Result<bool, Error>;
}

/// A stream of the driver: the pointer that `cudaStream_t` and `CUstream` stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamHandle(usize);

impl StreamHandle {
    /// Wraps a stream pointer; null is the default stream.
    pub fn new(stream: *mut c_void) -> Self {
        Self(stream as usize)
    }

    /// The pointer that CUDA's libraries take.
    pub fn as_ptr(self) -> *mut c_void {
        self.0 as *mut c_void
    }
}
