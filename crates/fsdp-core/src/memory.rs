//! The memory contract: buffers of one device, operations on its queues, and accounting of the bytes in use.
//!
//! A [`Memory::Buffer`] is a handle: a clone shares the same storage for reading, and shared storage cannot be written.
//! A collective in flight therefore holds clones of its inputs, and a write that would race with it fails.

mod arithmetic;
mod slices;

pub use crate::usage::{Bytes, Category, Usage};
pub use arithmetic::{Arithmetic, Rows};
pub use slices::{Buffer, HostSlice, HostSliceMut, Slice, SliceMut, View};

use crate::dtype::DType;
use crate::error::Error;
use crate::rank::Queue;

/// The memory of one rank's device.
///
/// Methods submit work to a [`Queue`]; it may run later, in queue order. [`Slice`] checks ranges. Lengths and dtypes
/// must match what each method states; a mismatch is a bug in this workspace and panics with a message that names it.
/// Any method may fail with [`Error::OutOfMemory`] when the device is full, or [`Error::Device`] when it is broken.
pub trait Memory: Send + Sync + 'static {
    /// A handle to device storage.
    type Buffer: Buffer;
    /// A point in a queue's work.
    type Event: Clone + Send + 'static;

    /// Allocates a buffer with unspecified contents. It is counted in `category` until its last handle is dropped.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    fn allocate(&self, category: Category, dtype: DType, len: usize) -> Result<Self::Buffer, Error>;

    /// Allocates a buffer in host memory that the device's queues can copy from and to, counted in [`Usage::host`]
    /// wherever the device's own buffers are. All operations and update rules accept such buffers; they work on them on
    /// the host, in queue order.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    fn allocate_host(&self, category: Category, dtype: DType, len: usize) -> Result<Self::Buffer, Error> {
        self.allocate(category, dtype, len)
    }

    /// Gives up the contents: they are unspecified (and may be poisoned) until written again. The buffer remains
    /// counted; storage shared through [`Memory::alias`] is released.
    fn release(&self, queue: Queue, buffer: &mut Self::Buffer);

    /// Makes `dst` a reader of `src`'s storage (same dtype and length) without copying, if this memory supports it;
    /// returns whether it did. `dst` remains counted as a buffer of its own.
    fn alias(&self, dst: &mut Self::Buffer, src: &Self::Buffer) -> bool;

    /// Sets every element to zero.
    ///
    /// # Errors
    /// [`Error::Shared`] when the storage has other handles.
    fn zero(&self, queue: Queue, dst: SliceMut<'_, Self::Buffer>) -> Result<(), Error>;

    /// Copies elements, converting between float dtypes with rounding to nearest even.
    ///
    /// # Errors
    /// [`Error::Shared`] when `dst` has other handles.
    fn copy(
        &self,
        queue: Queue,
        src: Slice<'_, Self::Buffer>,
        dst: SliceMut<'_, Self::Buffer>,
    ) -> Result<(), Error>;

    /// Computes an operation of [`Arithmetic`] into `dst`.
    ///
    /// # Errors
    /// [`Error::Shared`] when `dst` has other handles.
    fn compute(
        &self,
        queue: Queue,
        operation: Arithmetic<'_, Slice<'_, Self::Buffer>>,
        dst: SliceMut<'_, Self::Buffer>,
    ) -> Result<(), Error>;

    /// Copies part number `part` of `src`, whose length is a multiple of `dst`'s, to `dst`. The part differs between
    /// ranks.
    ///
    /// # Errors
    /// [`Error::Shared`] when `dst` has other handles.
    fn copy_part(
        &self,
        queue: Queue,
        src: &Self::Buffer,
        part: usize,
        dst: &mut Self::Buffer,
    ) -> Result<(), Error> {
        let len = dst.len();
        self.copy(queue, Slice::new(src, part * len, len), SliceMut::whole(dst))
    }

    /// Copies from the host, converting between float dtypes.
    ///
    /// # Errors
    /// As [`Memory::copy`].
    fn write(&self, queue: Queue, src: HostSlice<'_>, dst: SliceMut<'_, Self::Buffer>) -> Result<(), Error>;

    /// Copies to the host after all earlier work of `queue`, converting between float dtypes; blocks.
    ///
    /// # Errors
    /// As [`Memory::copy`].
    fn read(&self, queue: Queue, src: Slice<'_, Self::Buffer>, dst: HostSliceMut<'_>) -> Result<(), Error>;

    /// The elements of a whole buffer in host memory, readable by any thread as soon as a method of this trait has
    /// returned; `None` if this memory has queues or stores elements in another form.
    ///
    /// # Errors
    /// [`Error::Released`] when the buffer has no contents.
    fn host_bytes(buffer: &Self::Buffer) -> Option<Result<&[u8], Error>> {
        let _ = buffer;
        None
    }

    /// As [`Memory::host_bytes`], for writing; elements that were never written or were released are unspecified.
    ///
    /// # Errors
    /// [`Error::Shared`] when the storage has other handles; [`Error::OutOfMemory`] when it cannot be allocated.
    fn host_bytes_mut(buffer: &mut Self::Buffer) -> Option<Result<&mut [u8], Error>> {
        let _ = buffer;
        None
    }

    /// Copies numbers from the host to floats, rounded, or to bytes (`U8`), which must be able to represent them.
    ///
    /// # Errors
    /// As [`Memory::copy`].
    fn write_numbers(&self, queue: Queue, src: &[f64], dst: SliceMut<'_, Self::Buffer>) -> Result<(), Error> {
        if dst.buffer.dtype() != DType::U8 {
            return self.write(queue, HostSlice::F64(src), dst);
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "whole numbers below 256"
        )]
        let bytes: Vec<u8> = src.iter().map(|&number| number as u8).collect();
        self.write(queue, HostSlice::U8(&bytes), dst)
    }

    /// Copies floats or bytes (`U8`) to the host as numbers; blocks, as [`Memory::read`].
    ///
    /// # Errors
    /// As [`Memory::copy`].
    fn read_numbers(&self, queue: Queue, src: Slice<'_, Self::Buffer>, dst: &mut [f64]) -> Result<(), Error> {
        if src.buffer.dtype() != DType::U8 {
            return self.read(queue, src, HostSliceMut::F64(dst));
        }
        let mut bytes = vec![0; src.len];
        self.read(queue, src, HostSliceMut::U8(&mut bytes))?;
        dst.iter_mut().zip(bytes).for_each(|(number, byte)| *number = f64::from(byte));
        Ok(())
    }

    /// Marks the end of the work submitted to `queue` so far.
    fn record(&self, queue: Queue) -> Self::Event;

    /// Makes later work of `queue` wait for `event`.
    fn wait(&self, queue: Queue, event: &Self::Event);

    /// Announces the operations of a schedule, up to [`Memory::end_schedule`]. They are the same on all ranks, in the
    /// same order, with operands of the same sizes, so a memory may collect them and run them as one program.
    fn begin_schedule(&self) {}

    /// Marks the end of the schedule's operations.
    ///
    /// # Errors
    /// The errors of all its operations, if they start to run only now.
    fn end_schedule(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Whether work may still be running when the call that submitted it returns. Callers that care about speed then
    /// read results late ([`Memory::read`] waits), so that the device always has work queued.
    fn is_asynchronous(&self) -> bool {
        false
    }

    /// The bytes in use, as counted by this memory.
    fn usage(&self) -> Usage;
}
