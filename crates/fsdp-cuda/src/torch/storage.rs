//! What libtorch needs to know of a memory.

use fsdp_core::memory::{Memory, Slice, SliceMut};
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::Backend;
use fsdp_nn::backend::Dropout;

/// A range of a buffer of a storage that is read.
pub(super) type In<'a, D> = Slice<'a, <D as Memory>::Buffer>;

/// A range of a buffer of a storage that is written.
pub(super) type Out<'a, D> = SliceMut<'a, <D as Memory>::Buffer>;

/// Keeps implementations within this crate: views trust the addresses.
pub(super) mod sealed {
    /// A storage of this crate.
    pub trait Sealed {}
}

/// A memory whose buffers libtorch can look at, with kernels of ours for the operations that it has.
///
/// An address points to the elements of the range, contiguous, for as long as the range is borrowed.
pub trait TorchStorage: Backend + sealed::Sealed {
    /// Where buffers lie.
    fn device(&self) -> tch::Device;

    /// Where the elements of a range begin, for work of a queue.
    ///
    /// # Errors
    /// [`Error::Released`] when the buffer has no contents.
    fn address(&self, queue: Queue, slice: Slice<'_, Self::Buffer>) -> Result<*const u8, Error>;

    /// As [`TorchStorage::address`], to be written; the buffer takes storage if it has none.
    ///
    /// # Errors
    /// [`Error::Shared`] when the storage has other handles.
    fn address_mut(&self, queue: Queue, slice: SliceMut<'_, Self::Buffer>) -> Result<*mut u8, Error>;

    /// Makes a queue what libtorch's operations of this thread are enqueued on.
    ///
    /// # Errors
    /// [`Error::Device`] when the device has failed.
    fn enter(&self, queue: Queue) -> Result<(), Error>;

    /// Whether a buffer lies where libtorch computes: [`TorchStorage::device`].
    fn is_on_device(&self, _buffer: &Self::Buffer) -> bool {
        true
    }

    /// The factors of dropout for runs of `run_len` elements, side by side, where a kernel of ours makes them: run `i` has
    /// the elements from `firsts[i]` of the sample whose key is `runs.keys[i]`.
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
