//! The interface between libtorch and a memory.

use fsdp_core::memory::{Memory, Slice, SliceMut};
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::Backend;
use fsdp_nn::backend::Dropout;

/// A range of a buffer to be read.
pub(super) type In<'a, D> = Slice<'a, <D as Memory>::Buffer>;

/// A range of a buffer to be written.
pub(super) type Out<'a, D> = SliceMut<'a, <D as Memory>::Buffer>;

/// Restricts implementations to this crate: views trust the addresses.
pub(super) mod sealed {
    /// A storage of this crate.
    pub trait Sealed {}
}

/// A memory whose buffers libtorch can view, with its own kernels for the operations that it supports.
///
/// An address points to the contiguous elements of a range, and is valid as long as the range is borrowed.
pub trait TorchStorage: Backend + sealed::Sealed {
    /// libtorch's device for the buffers.
    fn device(&self) -> tch::Device;

    /// The address of a range, for work on a queue.
    ///
    /// # Errors
    /// [`Error::Released`] if the buffer has no contents.
    fn address(&self, queue: Queue, slice: Slice<'_, Self::Buffer>) -> Result<*const u8, Error>;

    /// Like [`TorchStorage::address`], for writing; the buffer allocates storage if it has none.
    ///
    /// # Errors
    /// [`Error::Shared`] if the storage has other handles.
    fn address_mut(&self, queue: Queue, slice: SliceMut<'_, Self::Buffer>) -> Result<*mut u8, Error>;

    /// Makes libtorch enqueue this thread's operations on a queue.
    ///
    /// # Errors
    /// [`Error::Device`] if the device has failed.
    fn enter(&self, queue: Queue) -> Result<(), Error>;

    /// Whether a buffer is on [`TorchStorage::device`], where libtorch computes.
    fn is_on_device(&self, _buffer: &Self::Buffer) -> bool {
        true
    }

    /// Dropout factors of runs of `run_len` elements, one after the other: run `i` has the elements from `firsts[i]` on
    /// of the sample whose key is `runs.keys[i]`. `None` if the memory has no kernel for them.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    fn dropout_factors(
        &self,
        _runs: Dropout<'_>,
        _firsts: &[u64],
        _dtype: DType,
        _run_len: usize,
    ) -> Result<Option<Self::Buffer>, Error> {
        Ok(None)
    }
}
