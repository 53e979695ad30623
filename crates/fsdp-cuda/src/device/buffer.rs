//! Buffer handles, on the device or in pinned host memory.
//!
//! The rules are those of [`HostBuffer`]: a handle is an entry in the rank's account and, once something was written,
//! storage; both are reference counted, and a handle whose entry or storage has other owners cannot be written. The
//! count does not cover work in flight, which queues and events order.

use std::sync::Arc;

use fsdp_core::memory::{Buffer, Category, Slice, SliceMut};
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::HostBuffer;
use fsdp_nn::accounting::{Account, Lease};

use super::full;
use super::pool::{Block, Pool};
use super::queues::Queues;
use crate::ffi::driver::Range;

/// A buffer of a [`CudaMemory`](super::CudaMemory).
#[derive(Clone, Debug)]
pub struct CudaBuffer(pub(super) Location);

/// A range of a [`CudaBuffer`] to be read.
pub(crate) type In<'a> = Slice<'a, CudaBuffer>;

/// A range of a [`CudaBuffer`] to be written.
pub(crate) type Out<'a> = SliceMut<'a, CudaBuffer>;

/// The location of a buffer.
#[derive(Clone, Debug)]
pub(super) enum Location {
    Device(DeviceBuffer),
    /// In pinned memory: devices copy from and to it; kernels on such buffers alone are the host's.
    Host(HostBuffer),
}

/// A handle to storage on the device.
#[derive(Clone, Debug)]
pub(super) struct DeviceBuffer {
    lease: Arc<Lease>,
    account: Arc<Account>,
    pool: Arc<Pool>,
    storage: Option<Arc<Block>>,
    /// Storage kept when the contents were released.
    spare: Option<Arc<Block>>,
    dtype: DType,
    len: usize,
}

impl DeviceBuffer {
    /// Creates a handle; allocates its storage unless the category is transient. If allocation fails, the error reports
    /// the usage of `account`, which need not be the account of the lease.
    pub(super) fn new(
        lease: Arc<Lease>,
        account: &Arc<Account>,
        pool: &Arc<Pool>,
        dtype: DType,
        len: usize,
    ) -> Result<Self, Error> {
        let (account, pool) = (Arc::clone(account), Arc::clone(pool));
        let mut buffer = Self { lease, account, pool, storage: None, spare: None, dtype, len };
        if !buffer.is_transient() && len > 0 {
            buffer.spare = Some(buffer.take_storage()?);
        }
        Ok(buffer)
    }

    fn is_transient(&self) -> bool {
        matches!(self.lease.category(), Category::Activation | Category::Workspace)
    }

    fn take_storage(&self) -> Result<Arc<Block>, Error> {
        let taken = self.pool.take(self.dtype, self.len);
        let (block, is_new) = taken.map_err(|error| {
            full::allocation_error(error, self.lease.category(), Some(&self.account.usage()))
        })?;
        if is_new {
            self.lease.count_allocation();
        }
        Ok(Arc::new(block))
    }

    /// Returns the bytes of a range that work on `queue` is about to read.
    pub(super) fn range(
        &self,
        queues: &Arc<Queues>,
        queue: Queue,
        offset: usize,
        len: usize,
    ) -> Result<Range<'_>, Error> {
        if len == 0 {
            return Ok(Range::empty());
        }
        let block = self.storage.as_ref().ok_or(Error::Released { len: self.len, dtype: self.dtype })?;
        block.touch(queues, queue);
        Ok(block.range(offset, len))
    }

    /// Returns the bytes of a range that work on `queue` is about to write.
    pub(super) fn range_mut(
        &mut self,
        queues: &Arc<Queues>,
        queue: Queue,
        offset: usize,
        len: usize,
    ) -> Result<Range<'_>, Error> {
        if len == 0 {
            return Ok(Range::empty());
        }
        let storage_handles = self.storage.as_ref().map_or(1, Arc::strong_count);
        let readers = Arc::strong_count(&self.lease).max(storage_handles) - 1;
        if readers > 0 {
            return Err(Error::Shared { len: self.len, dtype: self.dtype, readers });
        }
        let block = match self.storage.take().or_else(|| self.spare.take()) {
            Some(block) => block,
            None => self.take_storage()?,
        };
        let block = self.storage.insert(block);
        block.touch(queues, queue);
        Ok(block.range(offset, len))
    }

    /// Releases the contents; storage of transient categories returns to the pool, other storage is kept unless it has
    /// other readers.
    pub(super) fn release(&mut self, queues: &Queues, queue: Queue) {
        let Some(mut block) = self.storage.take() else { return };
        if self.is_transient() || Arc::get_mut(&mut block).is_none() {
            return;
        }
        queues.keep_error(block.poison(queues, queue));
        self.spare = Some(block);
    }

    /// Shares the storage of `other` from now on, if it has any; returns whether it has.
    pub(super) fn share(&mut self, other: &Self) -> bool {
        if other.storage.is_some() {
            self.storage.clone_from(&other.storage);
        }
        other.storage.is_some()
    }
}

impl CudaBuffer {
    /// Whether the buffer is in host memory.
    pub fn is_on_host(&self) -> bool {
        matches!(self.0, Location::Host(_))
    }

    /// The underlying host buffer; `None` if the buffer is on the device.
    pub(crate) fn as_host(&self) -> Option<&HostBuffer> {
        match &self.0 {
            Location::Host(buffer) => Some(buffer),
            Location::Device(_) => None,
        }
    }
}

/// The same range of the host buffer; `None` if the buffer is on the device.
pub(crate) fn host_slice<'a>(slice: &In<'a>) -> Option<Slice<'a, HostBuffer>> {
    slice.buffer.as_host().map(|buffer| Slice::new(buffer, slice.offset, slice.len))
}

/// The same writable range of the host buffer.
///
/// # Panics
/// Panics if the buffer is on the device.
pub(crate) fn host_slice_mut(slice: Out<'_>) -> SliceMut<'_, HostBuffer> {
    match &mut slice.buffer.0 {
        Location::Host(buffer) => SliceMut::new(buffer, slice.offset, slice.len),
        Location::Device(_) => panic!("the caller checked that it is on the host"),
    }
}

impl Buffer for CudaBuffer {
    fn len(&self) -> usize {
        match &self.0 {
            Location::Device(buffer) => buffer.len,
            Location::Host(buffer) => buffer.len(),
        }
    }

    fn dtype(&self) -> DType {
        match &self.0 {
            Location::Device(buffer) => buffer.dtype,
            Location::Host(buffer) => buffer.dtype(),
        }
    }

    fn is_exclusive(&self) -> bool {
        match &self.0 {
            Location::Device(buffer) => Arc::strong_count(&buffer.lease) == 1,
            Location::Host(buffer) => buffer.is_exclusive(),
        }
    }
}
