//! A caching pool for device storage.
//!
//! Unused storage is kept in lists by size, so that nothing is allocated after the first step: activations and
//! temporaries come and go, and storage shared by several ranks may outlive the buffer it was allocated for. It is
//! reused at once, without waiting for the device. Most of it is used only on the compute queue, where the next user's
//! work comes later anyway; other queues are ordered by events that go through the compute queue ([`Block::touch`]).
//!
//! Among storage that fits, the lowest address is taken: the address of a buffer then depends on what is in use, not on
//! the order of earlier releases. A step that does the same as the step before finds its buffers at the same addresses.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use fsdp_core::{DType, Queue};

use super::lock::lock;
use super::queues::Queues;
use super::reclaim;
use crate::error::DeviceError;
use crate::ffi::driver::{DeviceBlock, Gpu, Range};

/// Storage sizes are multiples of this, the driver's alignment.
const GRANULE_BYTES: usize = 512;

/// Bytes held from the driver.
#[derive(Debug, Default)]
struct Held {
    now: usize,
    peak: usize,
}

/// The storage of one rank.
#[derive(Debug)]
pub(super) struct Pool {
    gpu: Arc<Gpu>,
    queues: Arc<Queues>,
    /// Unused storage, by size and address.
    free: Mutex<BTreeMap<usize, BTreeMap<u64, DeviceBlock>>>,
    /// Bytes held from the driver, and their peak.
    held: Mutex<Held>,
    /// Whether storage is filled with NaN when it is allocated and when it is released.
    poison: bool,
}

impl Pool {
    pub(super) fn new(gpu: &Arc<Gpu>, queues: &Arc<Queues>, poison: bool) -> Arc<Self> {
        let (gpu, queues) = (Arc::clone(gpu), Arc::clone(queues));
        let pool = Arc::new(Self { gpu, queues, free: Mutex::default(), held: Mutex::default(), poison });
        reclaim::register(&pool);
        pool
    }

    /// Takes storage for elements; also returns whether it was newly allocated from the driver.
    pub(super) fn take(self: &Arc<Self>, dtype: DType, len: usize) -> Result<(Block, bool), DeviceError> {
        let bytes = (len * dtype.size_bytes()).next_multiple_of(GRANULE_BYTES);
        let found = lock(&self.free).get_mut(&bytes).and_then(BTreeMap::pop_first);
        let is_new = found.is_none();
        let storage = match found {
            Some((_, storage)) => storage,
            None => self.allocate(bytes)?,
        };
        let block = Block { storage: Some(storage), pool: Arc::clone(self), dtype, uses: Mutex::default() };
        if is_new && self.poison {
            block.poison(&self.queues, Queue::Compute)?;
            // Other queues may be the first to write it.
            self.queues.stream(Queue::Compute).synchronize()?;
        }
        Ok((block, is_new))
    }

    /// Peak of the bytes held from the driver, used or not.
    pub(super) fn held_peak_bytes(&self) -> usize {
        lock(&self.held).peak
    }

    /// The device number.
    pub(super) fn device(&self) -> usize {
        self.gpu.ordinal()
    }

    /// Allocates from the driver; if the device is full, tries again after freeing what memories like this one have
    /// unused, and then after asking the neighbors for theirs.
    fn allocate(&self, bytes: usize) -> Result<DeviceBlock, DeviceError> {
        let mut result = self.gpu.allocate(bytes);
        for make_room in [reclaim::give_back, reclaim::ask_neighbors] {
            if matches!(result, Err(DeviceError::OutOfMemory { .. })) && make_room(self.device()) {
                result = self.gpu.allocate(bytes);
            }
        }
        let block = result?;
        let mut held = lock(&self.held);
        held.now += bytes;
        held.peak = held.peak.max(held.now);
        Ok(block)
    }

    /// Returns unused storage to the driver; returns whether there was any. Any thread may call it; it waits for the
    /// device.
    pub(super) fn trim(&self) -> bool {
        let unused = std::mem::take(&mut *lock(&self.free));
        lock(&self.held).now -=
            unused.values().flat_map(BTreeMap::values).map(DeviceBlock::bytes).sum::<usize>();
        unused.values().any(|blocks| !blocks.is_empty())
    }
}

/// Storage of a buffer.
#[derive(Debug)]
pub(super) struct Block {
    storage: Option<DeviceBlock>,
    pool: Arc<Pool>,
    dtype: DType,
    /// Queues other than the own compute queue that have used it.
    uses: Mutex<Vec<(Arc<Queues>, Queue)>>,
}

impl Block {
    /// Announces that work on a queue is about to use the storage.
    pub(super) fn touch(&self, queues: &Arc<Queues>, queue: Queue) {
        let pool_queues = &self.pool.queues;
        if queue == Queue::Compute && Arc::ptr_eq(pool_queues, queues) {
            return;
        }
        let mut uses = lock(&self.uses);
        if !uses
            .iter()
            .any(|(used_queues, used_queue)| *used_queue == queue && Arc::ptr_eq(used_queues, queues))
        {
            // The previous user of the storage has synchronized with the compute queue.
            queues.wait(queue, &pool_queues.record(Queue::Compute));
            uses.push((Arc::clone(queues), queue));
        }
    }

    /// A range of elements.
    pub(super) fn range(&self, offset: usize, len: usize) -> Range<'_> {
        let size = self.dtype.size_bytes();
        self.device_block().range(offset * size, len * size)
    }

    /// Fills the storage with NaN, or with an implausible integer, if poisoning is enabled.
    pub(super) fn poison(&self, queues: &Queues, queue: Queue) -> Result<(), DeviceError> {
        if !self.pool.poison {
            return Ok(());
        }
        let byte = if self.dtype.is_float() { 0xff } else { 0xde };
        let block = self.device_block();
        queues.stream(queue).fill(block.range(0, block.bytes()), byte)
    }

    fn device_block(&self) -> &DeviceBlock {
        self.storage.as_ref().expect("storage is given back when it is dropped")
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let pool_queues = &self.pool.queues;
        for (queues, queue) in self.uses.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            pool_queues.wait(Queue::Compute, &queues.record(queue));
        }
        pool_queues.keep_error(self.poison(pool_queues, Queue::Compute));
        if let Some(storage) = self.storage.take() {
            lock(&self.pool.free).entry(storage.bytes()).or_default().insert(storage.address(), storage);
        }
    }
}
