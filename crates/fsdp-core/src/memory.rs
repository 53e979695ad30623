//! The memory contract: buffers of one device, work on its queues, and how much of it is in use.
//!
//! A [`Memory::Buffer`] is a handle: cloning it shares the same storage for reading, and storage that is
//! shared can not be written. So a collective in flight holds clones of its inputs, and a write that would
//! race with it fails instead.

mod slices;
mod usage;

pub use slices::{Buffer, HostSlice, HostSliceMut, Slice, SliceMut, View};
pub use usage::{Bytes, Category, Usage};

use crate::dtype::DType;
use crate::error::Error;
use crate::rank::Queue;
use crate::update::Piece;

/// The memory of one rank's device.
///
/// Work is given to a [`Queue`] and may happen later, in queue order. Ranges are checked by [`Slice`];
/// lengths and dtypes must be as each method says: anything else is a bug of ours, and a panic that names what differs.
/// Any method may find the device full, [`Error::OutOfMemory`], or broken, [`Error::Device`].
pub trait Memory: Send + Sync + 'static {
    /// A handle of device storage.
    type Buffer: Buffer;
    /// A point in a queue's work.
    type Event: Clone + Send + 'static;

    /// A new buffer with unspecified contents. It is counted in `category` until the last handle is dropped.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    fn allocate(&self, category: Category, dtype: DType, len: usize) -> Result<Self::Buffer, Error>;

    /// A new buffer in host memory that the device's queues can copy from and to, counted in [`Usage::host`]
    /// wherever the device's buffers are. All operations and update rules take such buffers; what they do to them
    /// happens on the host, in the order of the queue.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    fn allocate_host(&self, category: Category, dtype: DType, len: usize) -> Result<Self::Buffer, Error> {
        self.allocate(category, dtype, len)
    }

    /// Gives up the contents: they are unspecified (and may be poisoned) until written again. The buffer
    /// stays counted; storage shared through [`Memory::alias`] is let go.
    fn release(&self, queue: Queue, buffer: &mut Self::Buffer);

    /// Makes `dst` a reader of `src`'s storage (same dtype and length) without copying, if this memory can:
    /// returns whether it did. `dst` stays counted as itself.
    fn alias(&self, dst: &mut Self::Buffer, src: &Self::Buffer) -> bool;

    /// Sets every element to zero.
    ///
    /// # Errors
    /// [`Error::Shared`] when the storage has other handles.
    fn zero(&self, queue: Queue, dst: SliceMut<'_, Self::Buffer>) -> Result<(), Error>;

    /// Copies elements; between float dtypes it converts, rounding to nearest even.
    ///
    /// # Errors
    /// [`Error::Shared`] when `dst` has other handles.
    fn copy(
        &self,
        queue: Queue,
        src: Slice<'_, Self::Buffer>,
        dst: SliceMut<'_, Self::Buffer>,
    ) -> Result<(), Error>;

    /// `dst += src`, element by element, in one dtype (bf16 and f16: added in f32 and rounded; integers wrap).
    ///
    /// # Errors
    /// [`Error::Shared`] when `dst` has other handles.
    fn accumulate(
        &self,
        queue: Queue,
        src: Slice<'_, Self::Buffer>,
        dst: SliceMut<'_, Self::Buffer>,
    ) -> Result<(), Error>;

    /// Multiplies every element by `factor`, which is rounded to the dtype first; each product is rounded once (bf16 and
    /// f16: multiplied in f32 and rounded).
    ///
    /// # Errors
    /// [`Error::Shared`] when `dst` has other handles.
    fn scale(&self, queue: Queue, factor: f64, dst: SliceMut<'_, Self::Buffer>) -> Result<(), Error>;

    /// Adds the squares of all elements to `sum`, the words of an [`ExactSum`](crate::ExactSum) (`I64`): rows of
    /// `row_len` elements are summed in `f64` in a fixed order each, and the sums of rows exactly. `row_len`
    /// divides the length. Words need not be carried.
    ///
    /// # Errors
    /// [`Error::Shared`] when what is written has other handles.
    fn square_sum(
        &self,
        queue: Queue,
        src: Slice<'_, Self::Buffer>,
        row_len: usize,
        sum: SliceMut<'_, Self::Buffer>,
    ) -> Result<(), Error>;

    /// Adds the squares of the pieces of a shard to `sum`, as [`Memory::square_sum`] of each. Which pieces these are differs
    /// between ranks, and every rank makes this one call; what lies in no piece is zero.
    ///
    /// # Errors
    /// As [`Memory::square_sum`].
    fn square_sum_of_pieces(
        &self,
        queue: Queue,
        shard: &Self::Buffer,
        pieces: &[Piece],
        mut sum: SliceMut<'_, Self::Buffer>,
    ) -> Result<(), Error> {
        pieces.iter().try_for_each(|piece| {
            let slice = Slice::new(shard, piece.offset, piece.len);
            self.square_sum(queue, slice, piece.row_len, sum.reborrow())
        })
    }

    /// Copies the part of this number of a buffer that is a whole number of times as long as `dst`. Which part it is
    /// differs between ranks.
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

    /// Adds all elements (`F64`) to `sum`, the words of an [`ExactSum`](crate::ExactSum) (`I64`).
    ///
    /// # Errors
    /// [`Error::Shared`] when what is written has other handles.
    fn exact_sum(
        &self,
        queue: Queue,
        src: Slice<'_, Self::Buffer>,
        sum: SliceMut<'_, Self::Buffer>,
    ) -> Result<(), Error>;

    /// Adds whole numbers (`F64`) to as many words (`I64`), element by element.
    ///
    /// # Errors
    /// [`Error::Shared`] when what is written has other handles.
    fn add_counts(
        &self,
        queue: Queue,
        src: Slice<'_, Self::Buffer>,
        words: SliceMut<'_, Self::Buffer>,
    ) -> Result<(), Error>;

    /// Computes [`GradientFactors`](crate::scalars::GradientFactors) (`F64`) from the reduced scalars of a step
    /// (`I64`, [`SCALAR_WORDS`](crate::scalars::SCALAR_WORDS)), whose gradient was divided by `divisor`, as
    /// [`StepReport::of`](crate::scalars::StepReport::of) has it. `factors` holds those of the step before: what was
    /// not finite once stays so.
    ///
    /// # Errors
    /// [`Error::Shared`] when what is written has other handles.
    fn gradient_factors(
        &self,
        queue: Queue,
        scalars: Slice<'_, Self::Buffer>,
        divisor: f64,
        grad_clip: Option<f64>,
        factors: SliceMut<'_, Self::Buffer>,
    ) -> Result<(), Error>;

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

    /// The elements of a whole buffer as they lie in the host's memory, where they can be looked at by any thread as soon as
    /// a method of this trait has returned; `None` of a memory that has queues, or keeps elements otherwise.
    ///
    /// # Errors
    /// [`Error::Released`] when there are no contents.
    fn host_bytes(buffer: &Self::Buffer) -> Option<Result<&[u8], Error>> {
        let _ = buffer;
        None
    }

    /// As [`Memory::host_bytes`], to be written; what was never written, or was given up, is unspecified.
    ///
    /// # Errors
    /// [`Error::Shared`] when the storage has other handles; [`Error::OutOfMemory`] when there is no room.
    fn host_bytes_mut(buffer: &mut Self::Buffer) -> Option<Result<&mut [u8], Error>> {
        let _ = buffer;
        None
    }

    /// Copies numbers from the host to floats, rounded, or to bytes (`U8`), which must be able to hold them.
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

    /// Copies floats or bytes (`U8`) to the host as numbers, as [`Memory::read`].
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

    /// Marks the end of the work given to `queue` so far.
    fn record(&self, queue: Queue) -> Self::Event;

    /// Orders later work of `queue` behind `event`.
    fn wait(&self, queue: Queue, event: &Self::Event);

    /// The operations of a schedule follow, up to [`Memory::end_schedule`]. They are the same on all ranks, in the same order,
    /// with operands of the same sizes: a memory may collect them and run them as one program.
    fn begin_schedule(&self) {}

    /// All operations of the schedule were given.
    ///
    /// # Errors
    /// Those of all the operations, where they begin to run only now.
    fn end_schedule(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Whether work that was given to a queue may still be under way when the call returns. Callers who care about
    /// speed then read results late ([`Memory::read`] waits), so that the device always has work before it.
    fn is_asynchronous(&self) -> bool {
        false
    }

    /// What is in use, as counted by this memory itself.
    fn usage(&self) -> Usage;
}
