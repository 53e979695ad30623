//! What libraries that work on device memory by themselves (NCCL) need to know of it.

use std::ffi::c_void;

use fsdp_core::memory::{Memory, Slice, SliceMut};
use fsdp_core::{Error, Queue};

/// A memory whose buffers have addresses, and whose queues are streams that others can enqueue work on.
pub trait DeviceMemory: Memory {
    /// Where the elements of a range begin, for work of `queue` that reads them: later work of the queue is ordered behind
    /// who had the storage before. The address holds until the buffer is released or dropped.
    ///
    /// # Errors
    /// [`Error::Released`] when the buffer has no contents.
    fn pointer(&self, queue: Queue, slice: Slice<'_, Self::Buffer>) -> Result<u64, Error>;

    /// As [`DeviceMemory::pointer`], to be written; the buffer takes storage if it has none.
    ///
    /// # Errors
    /// [`Error::Shared`] when the storage has other handles; [`Error::OutOfMemory`].
    fn pointer_mut(&self, queue: Queue, slice: SliceMut<'_, Self::Buffer>) -> Result<u64, Error>;

    /// The stream of a queue, for as long as the memory lives.
    fn stream(&self, queue: Queue) -> StreamHandle;

    /// Makes the device the current one of the calling thread.
    ///
    /// # Errors
    /// [`Error::Device`] when the device has failed.
    fn bind(&self) -> Result<(), Error>;

    /// Whether the device has come past a point in a queue's work; any thread may ask, after [`DeviceMemory::bind`].
    ///
    /// # Errors
    /// [`Error::Device`] when the device has failed.
    fn is_complete(&self, event: &Self::Event) -> Result<bool, Error>;
}

/// A stream of the driver: what `cudaStream_t` and `CUstream` point to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamHandle(usize);

impl StreamHandle {
    /// The stream at an address; null is the default stream.
    pub fn new(stream: *mut c_void) -> Self {
        Self(stream as usize)
    }

    /// What the libraries of CUDA take.
    pub fn as_ptr(self) -> *mut c_void {
        self.0 as *mut c_void
    }
}
