//! [`Memory`] on the host. All queues run on the calling thread, so work is complete when a method returns.

use std::sync::Arc;

use fsdp_core::memory::{
    Arithmetic, Buffer, Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut, Usage,
};
use fsdp_core::{DType, Error, Queue};

use super::buffer::{HostBuffer, Source};
use super::element::{Element, Scalar, for_float, for_scalar};
use super::floats::{Floats, FloatsMut, transfer};
use super::pool::HostPool;
use super::workers::{TASK_ELEMS, Workers};
use crate::accounting::Account;
use crate::lengths;

/// Options of a rank's host memory.
#[derive(Clone, Debug)]
pub struct HostOptions {
    /// The pool that provides storage; shared by the ranks of a world.
    pub pool: Arc<HostPool>,
    /// Number of threads for this rank's kernels; 1 uses the calling thread only.
    pub threads: usize,
    /// Whether to fill storage with NaN when it is allocated and when it is released, which exposes reads of
    /// unwritten contents.
    pub poison: bool,
    /// Whether a buffer retains its storage when its contents are released. A rank's allocations are then independent
    /// of the other ranks. Otherwise storage returns to the pool, which needs less of it for many ranks.
    pub resident: bool,
}

impl Default for HostOptions {
    fn default() -> Self {
        Self { pool: HostPool::new(), threads: 1, poison: false, resident: false }
    }
}

/// The memory and compute of one rank on the host.
///
/// Accounting is logical: a buffer is counted from [`Memory::allocate`] until its last handle is dropped, whether or
/// not it has storage, which it takes from the pool when it is first written. [`Usage::allocations`] counts the
/// storage that the pool had to allocate for this memory. Scratch of kernels (a few blocks of rows per thread) and
/// the packing buffers of `gemm` are not counted.
#[derive(Debug)]
pub struct HostMemory {
    account: Arc<Account>,
    source: Source,
    workers: Workers,
}

impl HostMemory {
    /// Creates the memory of one rank.
    ///
    /// # Errors
    /// [`Error::Device`] if the threads cannot be started.
    pub fn new(options: HostOptions) -> Result<Self, Error> {
        Self::with_account(options, Arc::default())
    }

    /// Creates the memory of one rank with an account that it shares with other memory of the same rank.
    ///
    /// # Errors
    /// [`Error::Device`] if the threads cannot be started.
    pub fn with_account(options: HostOptions, account: Arc<Account>) -> Result<Self, Error> {
        let workers = Workers::new(options.threads, Arc::clone(&options.pool))?;
        let source = Source { pool: options.pool, poison: options.poison, resident: options.resident };
        Ok(Self { account, source, workers })
    }

    /// Gives storage that no buffer uses back to the allocator, in place of keeping it for buffers of the same size.
    pub fn trim(&self) {
        self.source.pool.trim();
    }

    /// Resets the peaks of [`Memory::usage`] to the current usage.
    pub fn reset_peaks(&self) {
        self.account.reset_peaks();
    }

    /// Returns the address of a range, valid until its buffer is written through another method, released or dropped.
    ///
    /// # Errors
    /// [`Error::Released`] if the buffer has no contents.
    pub fn address(&self, slice: Slice<'_, HostBuffer>) -> Result<*const u8, Error> {
        for_scalar!(slice.buffer.dtype(), E => Ok(self.elements::<E>(slice)?.as_ptr().cast()))
    }

    /// As [`HostMemory::address`], for writing; the buffer takes storage if it has none.
    ///
    /// # Errors
    /// [`Error::Shared`] if the storage has other handles.
    pub fn address_mut(&self, slice: SliceMut<'_, HostBuffer>) -> Result<*mut u8, Error> {
        for_scalar!(slice.buffer.dtype(), E => Ok(self.elements_mut::<E>(slice)?.as_mut_ptr().cast()))
    }

    /// Returns a range as bytes.
    ///
    /// # Errors
    /// [`Error::Released`] if the buffer has no contents.
    pub fn bytes<'a>(&self, slice: Slice<'a, HostBuffer>) -> Result<&'a [u8], Error> {
        bytes_of(slice)
    }

    /// As [`HostMemory::bytes`], for writing; the buffer takes storage if it has none.
    ///
    /// # Errors
    /// [`Error::Shared`] if the storage has other handles; [`Error::OutOfMemory`] if memory is exhausted.
    pub fn bytes_mut<'a>(&self, slice: SliceMut<'a, HostBuffer>) -> Result<&'a mut [u8], Error> {
        bytes_of_mut(slice)
    }

    /// Returns the threads that kernels use.
    pub(crate) fn workers(&self) -> &Workers {
        &self.workers
    }

    /// Returns the elements of a range.
    pub(crate) fn elements<'a, T: Scalar>(&self, slice: Slice<'a, HostBuffer>) -> Result<&'a [T], Error> {
        HostBuffer::elements(slice)
    }

    /// Returns the elements of a range for writing.
    pub(crate) fn elements_mut<'a, T: Scalar>(
        &self,
        slice: SliceMut<'a, HostBuffer>,
    ) -> Result<&'a mut [T], Error> {
        elements_of_mut(slice)
    }

    /// Returns a range of floats.
    pub(crate) fn floats<'a>(&self, slice: Slice<'a, HostBuffer>) -> Result<Floats<'a>, Error> {
        for_float!(slice.buffer.dtype(), E => Ok(E::floats(self.elements::<E>(slice)?)))
    }

    /// Returns a range of floats for writing.
    pub(crate) fn floats_mut<'a>(&self, slice: SliceMut<'a, HostBuffer>) -> Result<FloatsMut<'a>, Error> {
        for_float!(slice.buffer.dtype(), E => Ok(E::floats_mut(self.elements_mut::<E>(slice)?)))
    }

    fn copy_same<T: Scalar>(
        &self,
        src: Slice<'_, HostBuffer>,
        dst: SliceMut<'_, HostBuffer>,
    ) -> Result<(), Error> {
        let src = self.elements::<T>(src)?;
        let dst = self.elements_mut::<T>(dst)?;
        let tasks = dst.chunks_mut(TASK_ELEMS).zip(src.chunks(TASK_ELEMS));
        self.workers.each(tasks, |(dst, src)| dst.copy_from_slice(src));
        Ok(())
    }
}

fn elements_of_mut<T: Scalar>(slice: SliceMut<'_, HostBuffer>) -> Result<&mut [T], Error> {
    if slice.len == 0 {
        return Ok(&mut []);
    }
    let elements = slice.buffer.elements_mut()?;
    Ok(&mut elements[slice.offset..slice.offset + slice.len])
}

fn bytes_of(slice: Slice<'_, HostBuffer>) -> Result<&[u8], Error> {
    for_scalar!(slice.buffer.dtype(), E => Ok(bytemuck::cast_slice(HostBuffer::elements::<E>(slice)?)))
}

fn bytes_of_mut(slice: SliceMut<'_, HostBuffer>) -> Result<&mut [u8], Error> {
    for_scalar!(slice.buffer.dtype(), E => Ok(bytemuck::cast_slice_mut(elements_of_mut::<E>(slice)?)))
}

impl Memory for HostMemory {
    type Buffer = HostBuffer;
    type Event = ();

    fn allocate(&self, category: Category, dtype: DType, len: usize) -> Result<HostBuffer, Error> {
        let lease = self.account.open(category, dtype, len);
        let mut buffer = HostBuffer::new(lease, self.source.clone(), dtype, len);
        if !matches!(category, Category::Activation | Category::Workspace) {
            buffer.reserve()?;
        }
        Ok(buffer)
    }

    fn allocate_host(&self, category: Category, dtype: DType, len: usize) -> Result<HostBuffer, Error> {
        let lease = self.account.open_host(category, dtype, len);
        let mut buffer = HostBuffer::new(lease, self.source.clone(), dtype, len);
        buffer.reserve()?;
        Ok(buffer)
    }

    fn release(&self, _queue: Queue, buffer: &mut HostBuffer) {
        buffer.release();
    }

    fn alias(&self, dst: &mut HostBuffer, src: &HostBuffer) -> bool {
        dst.dtype() == src.dtype() && dst.len() == src.len() && dst.share(src)
    }

    fn zero(&self, _queue: Queue, dst: SliceMut<'_, HostBuffer>) -> Result<(), Error> {
        for_scalar!(dst.buffer.dtype(), E => {
            self.elements_mut::<E>(dst)?.fill(bytemuck::Zeroable::zeroed());
            Ok(())
        })
    }

    fn copy(
        &self,
        _queue: Queue,
        src: Slice<'_, HostBuffer>,
        dst: SliceMut<'_, HostBuffer>,
    ) -> Result<(), Error> {
        lengths::expect("copied elements", src.len, dst.len);
        if src.buffer.dtype() == dst.buffer.dtype() {
            return for_scalar!(dst.buffer.dtype(), E => self.copy_same::<E>(src, dst));
        }
        let src = self.floats(src)?;
        transfer(src, self.floats_mut(dst)?, false);
        Ok(())
    }

    fn compute(
        &self,
        _queue: Queue,
        operation: Arithmetic<'_, Slice<'_, HostBuffer>>,
        dst: SliceMut<'_, HostBuffer>,
    ) -> Result<(), Error> {
        self.arithmetic(operation, dst)
    }

    fn write(&self, _queue: Queue, src: HostSlice<'_>, dst: SliceMut<'_, HostBuffer>) -> Result<(), Error> {
        lengths::expect("written elements", lengths::of_host(&src), dst.len);
        match src {
            HostSlice::F32(src) => transfer(Floats::F32(src), self.floats_mut(dst)?, false),
            HostSlice::F64(src) => transfer(Floats::F64(src), self.floats_mut(dst)?, false),
            HostSlice::U8(src) => self.elements_mut(dst)?.copy_from_slice(src),
            HostSlice::U32(src) => self.elements_mut(dst)?.copy_from_slice(src),
            HostSlice::I64(src) => self.elements_mut(dst)?.copy_from_slice(src),
        }
        Ok(())
    }

    fn read(&self, _queue: Queue, src: Slice<'_, HostBuffer>, dst: HostSliceMut<'_>) -> Result<(), Error> {
        lengths::expect("read elements", src.len, lengths::of_host_mut(&dst));
        match dst {
            HostSliceMut::F32(dst) => transfer(self.floats(src)?, FloatsMut::F32(dst), false),
            HostSliceMut::F64(dst) => transfer(self.floats(src)?, FloatsMut::F64(dst), false),
            HostSliceMut::U8(dst) => dst.copy_from_slice(self.elements(src)?),
            HostSliceMut::U32(dst) => dst.copy_from_slice(self.elements(src)?),
            HostSliceMut::I64(dst) => dst.copy_from_slice(self.elements(src)?),
        }
        Ok(())
    }

    fn host_bytes(buffer: &HostBuffer) -> Option<Result<&[u8], Error>> {
        Some(bytes_of(Slice::whole(buffer)))
    }

    fn host_bytes_mut(buffer: &mut HostBuffer) -> Option<Result<&mut [u8], Error>> {
        Some(bytes_of_mut(SliceMut::whole(buffer)))
    }

    fn record(&self, _queue: Queue) {}

    fn wait(&self, _queue: Queue, _event: &()) {}

    fn usage(&self) -> Usage {
        self.account.usage()
    }
}
