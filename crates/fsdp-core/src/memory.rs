//! The memory contract: buffers of one device, work on its queues, and how much of it is in use.
//!
//! A [`Memory::Buffer`] is a handle: cloning it shares the same storage for reading, and storage that is
//! shared can not be written. So a collective in flight holds clones of its inputs, and a write that would
//! race with it fails instead.

use std::fmt;

use crate::dtype::DType;
use crate::error::Error;
use crate::rank::Queue;

/// What a buffer is for; memory is predicted and counted by category.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Category {
    /// This rank's rows of the parameters: the master copy, and its low-precision copy when the two differ.
    ParameterShard,
    /// Slots that hold whole units while they compute, and sub-shards kept after forward.
    Unsharded,
    /// Slots that hold whole unreduced gradients of units.
    GradientSlot,
    /// This rank's rows of the reduced gradients.
    ShardedGradient,
    /// Partial sums of gradients over micro-batches.
    Accumulator,
    /// State of the update rule.
    OptimizerState,
    /// What forward saves for backward, and tensors that travel between blocks.
    Activation,
    /// Temporaries within one block.
    Workspace,
    /// Small buffers for the reduction of scalars and statistics.
    CommStaging,
    /// Slots through which shards and reduced gradients travel between device and host.
    HostStaging,
}

impl Category {
    /// All categories, in report order.
    pub const ALL: [Category; Category::COUNT] = [
        Category::ParameterShard,
        Category::Unsharded,
        Category::GradientSlot,
        Category::ShardedGradient,
        Category::Accumulator,
        Category::OptimizerState,
        Category::Activation,
        Category::Workspace,
        Category::CommStaging,
        Category::HostStaging,
    ];

    /// How many there are.
    pub const COUNT: usize = 10;

    /// The name used in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Category::ParameterShard => "parameter shards",
            Category::Unsharded => "unsharded slots",
            Category::GradientSlot => "gradient slots",
            Category::ShardedGradient => "sharded gradients",
            Category::Accumulator => "accumulators",
            Category::OptimizerState => "optimizer state",
            Category::Activation => "activations",
            Category::Workspace => "workspace",
            Category::CommStaging => "communication staging",
            Category::HostStaging => "host copy staging",
        }
    }
}

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Bytes in use of one kind of memory, by category, in the order of [`Category::ALL`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bytes {
    /// Bytes allocated now.
    pub live_bytes: [usize; Category::COUNT],
    /// The most bytes that were allocated at once, per category (peaks of different categories need not
    /// coincide).
    pub peak_bytes: [usize; Category::COUNT],
    /// The most bytes of all categories together that were allocated at once.
    pub total_peak_bytes: usize,
}

impl Bytes {
    /// Bytes of a category that are allocated now.
    pub fn live(&self, category: Category) -> usize {
        self.live_bytes[category as usize]
    }

    /// The highest number of bytes of a category.
    pub fn peak(&self, category: Category) -> usize {
        self.peak_bytes[category as usize]
    }

    /// Counts bytes that are allocated.
    pub fn add(&mut self, category: Category, bytes: usize) {
        let slot = category as usize;
        self.live_bytes[slot] += bytes;
        self.peak_bytes[slot] = self.peak_bytes[slot].max(self.live_bytes[slot]);
        self.total_peak_bytes = self.total_peak_bytes.max(self.live_bytes.iter().sum());
    }

    /// Counts bytes that are freed.
    pub fn remove(&mut self, category: Category, bytes: usize) {
        self.live_bytes[category as usize] -= bytes;
    }

    /// Forgets the peaks: they are what is in use now.
    pub fn reset_peaks(&mut self) {
        (self.peak_bytes, self.total_peak_bytes) = (self.live_bytes, self.live_bytes.iter().sum());
    }
}

/// Memory in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// That of the device.
    pub device: Bytes,
    /// That of the host, as far as [`Memory::allocate_host`] took it.
    pub host: Bytes,
    /// How many times the backing allocator was asked for storage.
    pub allocations: u64,
}

impl Usage {
    /// Bytes of the device of a category that are allocated now.
    pub fn live(&self, category: Category) -> usize {
        self.device.live(category)
    }

    /// The highest number of bytes of the device of a category.
    pub fn peak(&self, category: Category) -> usize {
        self.device.peak(category)
    }
}

/// Facts about a buffer handle.
pub trait Buffer: Clone + Send + Sync + 'static {
    /// Number of elements.
    fn len(&self) -> usize;

    /// Whether there are no elements.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Type of the elements.
    fn dtype(&self) -> DType;

    /// Whether this handle is the only one of its buffer. (Other buffers may read the same storage through
    /// [`Memory::alias`]; it can not be written then.)
    fn is_exclusive(&self) -> bool;
}

#[track_caller]
fn check_range(buffer: &impl Buffer, offset: usize, len: usize) {
    assert!(offset + len <= buffer.len(), "range {offset}..{} of a buffer of {}", offset + len, buffer.len());
}

/// A readable range of a buffer, in elements.
#[derive(Debug)]
pub struct Slice<'a, B> {
    /// The buffer.
    pub buffer: &'a B,
    /// First element.
    pub offset: usize,
    /// Number of elements.
    pub len: usize,
}

impl<B> Clone for Slice<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B> Copy for Slice<'_, B> {}

impl<'a, B: Buffer> Slice<'a, B> {
    /// The range `offset .. offset + len` of `buffer`.
    ///
    /// # Panics
    /// When the range does not lie within the buffer.
    pub fn new(buffer: &'a B, offset: usize, len: usize) -> Self {
        check_range(buffer, offset, len);
        Self { buffer, offset, len }
    }

    /// The whole buffer.
    pub fn whole(buffer: &'a B) -> Self {
        Self { buffer, offset: 0, len: buffer.len() }
    }
}

/// A writable range of a buffer, in elements.
#[derive(Debug)]
pub struct SliceMut<'a, B> {
    /// The buffer.
    pub buffer: &'a mut B,
    /// First element.
    pub offset: usize,
    /// Number of elements.
    pub len: usize,
}

impl<'a, B: Buffer> SliceMut<'a, B> {
    /// The range `offset .. offset + len` of `buffer`.
    ///
    /// # Panics
    /// When the range does not lie within the buffer.
    pub fn new(buffer: &'a mut B, offset: usize, len: usize) -> Self {
        check_range(buffer, offset, len);
        Self { buffer, offset, len }
    }

    /// The whole buffer.
    pub fn whole(buffer: &'a mut B) -> Self {
        let len = buffer.len();
        Self { buffer, offset: 0, len }
    }

    /// The same range for a shorter time.
    pub fn reborrow(&mut self) -> SliceMut<'_, B> {
        SliceMut { buffer: self.buffer, offset: self.offset, len: self.len }
    }

    /// The same range, readable.
    pub fn as_slice(&self) -> Slice<'_, B> {
        Slice { buffer: self.buffer, offset: self.offset, len: self.len }
    }
}

/// A readable range that keeps its buffer alive: what a block is handed as a parameter.
#[derive(Clone, Debug)]
pub struct View<B> {
    /// A shared handle.
    pub buffer: B,
    /// First element.
    pub offset: usize,
    /// Number of elements.
    pub len: usize,
}

impl<B: Buffer> View<B> {
    /// The range as a borrowed slice.
    pub fn slice(&self) -> Slice<'_, B> {
        Slice::new(&self.buffer, self.offset, self.len)
    }
}

/// Elements on the host, to be copied into a buffer.
#[derive(Clone, Copy, Debug)]
pub enum HostSlice<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// Double precision.
    F64(&'a [f64]),
    /// Bytes.
    U8(&'a [u8]),
    /// Token ids.
    U32(&'a [u32]),
    /// Integers.
    I64(&'a [i64]),
}

/// Room on the host for elements of a buffer.
#[derive(Debug)]
pub enum HostSliceMut<'a> {
    /// Single precision.
    F32(&'a mut [f32]),
    /// Double precision.
    F64(&'a mut [f64]),
    /// Bytes.
    U8(&'a mut [u8]),
    /// Integers.
    I64(&'a mut [i64]),
}

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

    /// Whether work that was given to a queue may still be under way when the call returns. Callers who care about
    /// speed then read results late ([`Memory::read`] waits), so that the device always has work before it.
    fn is_asynchronous(&self) -> bool {
        false
    }

    /// What is in use, as counted by this memory itself.
    fn usage(&self) -> Usage;
}
