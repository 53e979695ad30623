//! [`Memory`] of a CUDA device.
//!
//! Buffers are on the device or in pinned host memory, which kernels can access too. Work on device buffers is enqueued
//! on the stream of its queue. Work on pinned buffers alone is done by the host's kernels, after all earlier work on
//! the queue, so the host waits for that. The device copies between the two; any other mix is a kernel that accesses
//! host memory over the bus.

use std::sync::{Arc, Mutex};

use fsdp_core::memory::{
    Arithmetic, Buffer, Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut, Usage,
};
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::accounting::Account;
use fsdp_nn::{HostMemory, HostOptions, HostPool, lengths};

use super::buffer::{CudaBuffer, DeviceBuffer, In, Location, Out, host_slice, host_slice_mut};
use super::contract::{DeviceMemory, StreamHandle};
use super::pinned::PinnedBlocks;
use super::pool::Pool;
use super::queues::{CudaEvent, Queues, TimedEvent};
use super::rotations::Rotation;
use super::staging::Staging;
use super::transfer;
use crate::error::DeviceError;
use crate::ffi::driver::{Gpu, Range};
use crate::kernels::{Arg, CONVERT, Kernels, Launch, Source};

/// Options of a rank's memory.
#[derive(Clone, Copy, Debug)]
pub struct CudaOptions {
    /// Device number.
    pub device: usize,
    /// Number of threads of the host's kernels, for buffers in pinned memory.
    pub threads: usize,
    /// Whether storage is filled with NaN when it is allocated and when it is released, to expose reads of contents
    /// that were not written.
    pub poison: bool,
}

impl CudaOptions {
    /// The default options for a device.
    pub fn new(device: usize) -> Self {
        Self { device, threads: 1, poison: false }
    }
}

/// The memory of one rank on a CUDA device. Several ranks may share a device; each has its own streams.
#[derive(Debug)]
pub struct CudaMemory {
    gpu: Arc<Gpu>,
    account: Arc<Account>,
    /// The account of the kernels' scratch memory, which is not part of the usage; the host does not count it either.
    scratch_account: Arc<Account>,
    pub(super) queues: Arc<Queues>,
    pool: Arc<Pool>,
    pub(super) staging: Mutex<Staging>,
    kernels: Arc<Kernels>,
    pub(super) rotations: Mutex<Vec<Rotation>>,
    pub(super) code_books: Mutex<Option<CudaBuffer>>,
    /// Buffers in pinned memory, and the kernels for them.
    host: HostMemory,
    /// Ordinary host memory, for copies that the host's update rules work on.
    mirror: HostMemory,
    poison: bool,
}

impl CudaMemory {
    /// Creates the memory of one rank.
    ///
    /// # Errors
    /// [`Error::Device`] if there is no driver or no such device, or if the threads cannot be started.
    pub fn new(options: CudaOptions) -> Result<Self, Error> {
        let gpu = Gpu::open(options.device)?;
        let account = Arc::<Account>::default();
        let queues = Arc::new(Queues::new(&gpu)?);
        let pool = Pool::new(&gpu, &queues, options.poison);
        let pinned = PinnedBlocks { gpu: Arc::clone(&gpu), account: Arc::clone(&account) };
        let host_options = HostOptions {
            pool: HostPool::of_blocks(Arc::new(pinned)),
            threads: options.threads,
            poison: options.poison,
            resident: true,
        };
        let host = HostMemory::with_account(host_options, Arc::clone(&account))?;
        let mirror = HostMemory::new(HostOptions { threads: options.threads, ..HostOptions::default() })?;
        let staging = Mutex::new(Staging::new(&gpu));
        let kernels = Kernels::of(&gpu);
        let (rotations, code_books) = (Mutex::default(), Mutex::default());
        let scratch_account = Arc::default();
        let poison = options.poison;
        Ok(Self {
            gpu,
            account,
            scratch_account,
            queues,
            pool,
            staging,
            kernels,
            rotations,
            code_books,
            host,
            mirror,
            poison,
        })
    }

    /// The name of the device.
    pub fn name(&self) -> &str {
        self.gpu.name()
    }

    /// The device number.
    pub fn device(&self) -> usize {
        self.gpu.ordinal()
    }

    /// Free and total bytes of the device, over all its users.
    ///
    /// # Errors
    /// [`DeviceError::Call`] if the device has failed.
    pub fn free_and_total_bytes(&self) -> Result<(usize, usize), DeviceError> {
        self.gpu.memory()
    }

    /// The most bytes that this memory has ever held from the driver, whether in use or cached: never less than the
    /// device bytes counted by [`Memory::usage`].
    pub fn held_peak_bytes(&self) -> usize {
        self.pool.held_peak_bytes()
    }

    /// Records a timed event after all earlier work on a queue.
    ///
    /// # Errors
    /// [`DeviceError::Call`] if the device has failed.
    pub fn record_timed(&self, queue: Queue) -> Result<TimedEvent, DeviceError> {
        self.queues.record_timed(queue)
    }

    /// Waits for all work on a queue.
    ///
    /// # Errors
    /// [`Error::Device`] if the device has failed.
    pub fn synchronize(&self, queue: Queue) -> Result<(), Error> {
        self.queues.check()?;
        Ok(self.queues.stream(queue).synchronize()?)
    }

    /// The host memory whose kernels work on pinned buffers, after waiting for all earlier work on the queue.
    pub(crate) fn host_after(&self, queue: Queue) -> Result<&HostMemory, Error> {
        self.synchronize(queue)?;
        Ok(&self.host)
    }

    /// Ordinary host memory.
    pub(crate) fn mirror(&self) -> &HostMemory {
        &self.mirror
    }

    /// Returns the bytes of a range that work on `queue` is about to read.
    pub(crate) fn range<'a>(&self, queue: Queue, slice: In<'a>) -> Result<Range<'a>, Error> {
        self.queues.check()?;
        match &slice.buffer.0 {
            Location::Device(buffer) => buffer.range(&self.queues, queue, slice.offset, slice.len),
            Location::Host(buffer) => {
                let slice = Slice::new(buffer, slice.offset, slice.len);
                Ok(Range::pinned(self.host.bytes(slice)?))
            }
        }
    }

    /// Returns the bytes of a range that work on `queue` is about to write.
    pub(crate) fn range_mut<'a>(&self, queue: Queue, slice: Out<'a>) -> Result<Range<'a>, Error> {
        self.queues.check()?;
        match &mut slice.buffer.0 {
            Location::Device(buffer) => buffer.range_mut(&self.queues, queue, slice.offset, slice.len),
            Location::Host(buffer) => {
                let slice = SliceMut::new(buffer, slice.offset, slice.len);
                Ok(Range::pinned(self.host.bytes_mut(slice)?))
            }
        }
    }

    /// Allocates a buffer for the kernels' own use on the compute queue; its storage comes from the pool.
    pub(crate) fn scratch(&self, dtype: DType, len: usize) -> Result<CudaBuffer, Error> {
        let lease = self.scratch_account.open(Category::Workspace, dtype, len);
        let buffer = DeviceBuffer::new(lease, &self.account, &self.pool, dtype, len)?;
        Ok(CudaBuffer(Location::Device(buffer)))
    }

    /// The kernels of a source for element types `T` and `S`, to be launched on a queue.
    pub(crate) fn kernels(&self, queue: Queue, source: &'static Source, types: (DType, DType)) -> Launch<'_> {
        Launch { kernels: &self.kernels, stream: self.queues.stream(queue), source, types }
    }

    /// The arguments of elementwise kernels: source, destination and length.
    pub(super) fn elementwise_args<'a>(
        &self,
        queue: Queue,
        src: In<'a>,
        dst: Out<'a>,
    ) -> Result<[Arg<'a>; 3], Error> {
        let len = Arg::Len(src.len);
        Ok([Arg::Range(self.range(queue, src)?), Arg::Range(self.range_mut(queue, dst)?), len])
    }
}

/// Checks that a buffer has a dtype.
///
/// # Panics
/// Panics if it has another one, which only an internal bug can cause; see also [`expect_float`].
#[track_caller]
pub(crate) fn expect_dtype(buffer: &CudaBuffer, expected: DType) {
    assert_eq!(buffer.dtype(), expected, "a buffer of {} is used where {expected} is needed", buffer.dtype());
}

/// Returns the dtype of a buffer, which must be a float.
#[track_caller]
pub(crate) fn expect_float(buffer: &CudaBuffer) -> DType {
    let dtype = buffer.dtype();
    if dtype.is_float() { dtype } else { lengths::not_a_float(dtype) }
}

impl Memory for CudaMemory {
    type Buffer = CudaBuffer;
    type Event = CudaEvent;

    fn allocate(&self, category: Category, dtype: DType, len: usize) -> Result<CudaBuffer, Error> {
        self.queues.check()?;
        let lease = self.account.open(category, dtype, len);
        let buffer = DeviceBuffer::new(lease, &self.account, &self.pool, dtype, len)?;
        Ok(CudaBuffer(Location::Device(buffer)))
    }

    fn allocate_host(&self, category: Category, dtype: DType, len: usize) -> Result<CudaBuffer, Error> {
        Ok(CudaBuffer(Location::Host(self.host.allocate_host(category, dtype, len)?)))
    }

    fn release(&self, queue: Queue, buffer: &mut CudaBuffer) {
        match &mut buffer.0 {
            Location::Device(buffer) => buffer.release(&self.queues, queue),
            Location::Host(buffer) => {
                // The host writes poison immediately, so earlier readers must have finished.
                if self.poison {
                    self.queues.keep_error(self.queues.stream(queue).synchronize());
                }
                self.host.release(queue, buffer);
            }
        }
    }

    fn alias(&self, dst: &mut CudaBuffer, src: &CudaBuffer) -> bool {
        if dst.dtype() != src.dtype() || dst.len() != src.len() {
            return false;
        }
        match (&mut dst.0, &src.0) {
            (Location::Device(dst), Location::Device(src)) => dst.share(src),
            (Location::Host(dst), Location::Host(src)) => self.host.alias(dst, src),
            _ => false,
        }
    }

    fn zero(&self, queue: Queue, dst: Out<'_>) -> Result<(), Error> {
        if dst.buffer.is_on_host() {
            return self.host_after(queue)?.zero(queue, host_slice_mut(dst));
        }
        Ok(self.queues.stream(queue).fill(self.range_mut(queue, dst)?, 0)?)
    }

    fn copy(&self, queue: Queue, src: In<'_>, dst: Out<'_>) -> Result<(), Error> {
        lengths::expect("copied elements", src.len, dst.len);
        if let (Some(src), true) = (host_slice(&src), dst.buffer.is_on_host()) {
            return self.host_after(queue)?.copy(queue, src, host_slice_mut(dst));
        }
        let types = (dst.buffer.dtype(), src.buffer.dtype());
        let len = dst.len;
        if types.0 == types.1 {
            let src = self.range(queue, src)?;
            return Ok(self.queues.stream(queue).copy(src, self.range_mut(queue, dst)?)?);
        }
        expect_float(src.buffer);
        expect_float(dst.buffer);
        let args = self.elementwise_args(queue, src, dst)?;
        Ok(self.kernels(queue, &CONVERT, types).elements("cast", len, &args)?)
    }

    fn compute(&self, queue: Queue, operation: Arithmetic<'_, In<'_>>, dst: Out<'_>) -> Result<(), Error> {
        self.arithmetic(queue, operation, dst)
    }

    fn write(&self, queue: Queue, src: HostSlice<'_>, dst: Out<'_>) -> Result<(), Error> {
        lengths::expect("written elements", lengths::of_host(&src), dst.len);
        if dst.buffer.is_on_host() {
            return self.host_after(queue)?.write(queue, src, host_slice_mut(dst));
        }
        transfer::write(self, queue, src, dst)
    }

    fn read(&self, queue: Queue, src: In<'_>, dst: HostSliceMut<'_>) -> Result<(), Error> {
        lengths::expect("read elements", src.len, lengths::of_host_mut(&dst));
        if let Some(src) = host_slice(&src) {
            return self.host_after(queue)?.read(queue, src, dst);
        }
        transfer::read(self, queue, src, dst)
    }

    fn record(&self, queue: Queue) -> CudaEvent {
        self.queues.record(queue)
    }

    fn wait(&self, queue: Queue, event: &CudaEvent) {
        self.queues.wait(queue, event);
    }

    fn is_asynchronous(&self) -> bool {
        true
    }

    fn usage(&self) -> Usage {
        self.account.usage()
    }
}

impl DeviceMemory for CudaMemory {
    fn pointer(&self, queue: Queue, slice: In<'_>) -> Result<u64, Error> {
        Ok(self.range(queue, slice)?.address())
    }

    fn pointer_mut(&self, queue: Queue, slice: Out<'_>) -> Result<u64, Error> {
        Ok(self.range_mut(queue, slice)?.address())
    }

    fn stream(&self, queue: Queue) -> StreamHandle {
        self.queues.stream(queue).handle()
    }

    fn bind(&self) -> Result<(), Error> {
        Ok(self.gpu.bind()?)
    }

    fn is_complete(&self, event: &CudaEvent) -> Result<bool, Error> {
        Ok(event.has_happened()?)
    }
}
