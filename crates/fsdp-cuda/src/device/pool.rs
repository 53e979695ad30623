//! Storage on the device.
//!
//! Storage returns to lists by size when nobody holds it, so that after the first step nothing is allocated:
//! activations and temporaries come and go, and what several ranks read may outlive the buffer it was made for. It is
//! handed on at once, without waiting for the device. Most of it is used on the compute queue alone, where the work of
//! the next user comes later; other queues are ordered by events, the compute queue in between ([`Block::touch`]).
//!
//! Of storage that fits, the lowest is taken: where a buffer lies then depends on what is in use, and not on the order in
//! which other buffers were given up. So a step that does what the step before it did finds its buffers at the same addresses.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use fsdp_core::{DType, Queue};

use super::lock::lock;
use super::queues::Queues;
use super::relief;
use crate::error::DeviceError;
use crate::ffi::driver::{DeviceBlock, Gpu, Range};

/// Lengths of storage are multiples of this: what the driver aligns to.
const GRANULE_BYTES: usize = 512;

/// Bytes of storage.
#[derive(Debug, Default)]
struct Held {
    now: usize,
    peak: usize,
}

/// Storage of one rank.
#[derive(Debug)]
pub(super) struct Pool {
    gpu: Arc<Gpu>,
    queues: Arc<Queues>,
    /// By size and address.
    free: Mutex<BTreeMap<usize, BTreeMap<u64, DeviceBlock>>>,
    /// Bytes that the driver gave and has not got back, and the most that there ever were.
    held: Mutex<Held>,
    /// Whether storage is filled with NaN when it is new and when it is given up.
    poison: bool,
}

impl Pool {
    pub(super) fn new(gpu: &Arc<Gpu>, queues: &Arc<Queues>, poison: bool) -> Arc<Self> {
        let (gpu, queues) = (Arc::clone(gpu), Arc::clone(queues));
        let pool = Arc::new(Self { gpu, queues, free: Mutex::default(), held: Mutex::default(), poison });
        relief::join(&pool);
        pool
    }

    /// Storage for elements, and whether the driver was asked for it.
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

    /// The most bytes that the driver ever gave at once, used or not.
    pub(super) fn held_peak_bytes(&self) -> usize {
        lock(&self.held).peak
    }

    /// Number of the device.
    pub(super) fn device(&self) -> usize {
        self.gpu.ordinal()
    }

    /// Asks the driver; when it has no room, once more without what lies unused in memories like this one, and once more
    /// without what neighbours keep.
    fn allocate(&self, bytes: usize) -> Result<DeviceBlock, DeviceError> {
        let mut found = self.gpu.allocate(bytes);
        for make_room in [relief::give_back, relief::ask_neighbours] {
            if matches!(found, Err(DeviceError::OutOfMemory { .. })) && make_room(self.device()) {
                found = self.gpu.allocate(bytes);
            }
        }
        let block = found?;
        let mut held = lock(&self.held);
        held.now += bytes;
        held.peak = held.peak.max(held.now);
        Ok(block)
    }

    /// Gives storage that no buffer uses back to the driver; returns whether there was any. Any thread may call it: the
    /// device is waited for.
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
    /// Says that work of a queue is about to use it.
    pub(super) fn touch(&self, queues: &Arc<Queues>, queue: Queue) {
        let own = &self.pool.queues;
        if queue == Queue::Compute && Arc::ptr_eq(own, queues) {
            return;
        }
        let mut uses = lock(&self.uses);
        if !uses.iter().any(|(theirs, used)| *used == queue && Arc::ptr_eq(theirs, queues)) {
            // Whoever had the storage before has put it behind the compute queue.
            queues.wait(queue, &own.record(Queue::Compute));
            uses.push((Arc::clone(queues), queue));
        }
    }

    /// A range of elements.
    pub(super) fn range(&self, offset: usize, len: usize) -> Range<'_> {
        let size = self.dtype.size_bytes();
        self.device_block().range(offset * size, len * size)
    }

    /// Fills it with NaN, or with an implausible integer, when the pool does such things.
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
        let own = &self.pool.queues;
        for (queues, queue) in self.uses.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            own.wait(Queue::Compute, &queues.record(queue));
        }
        own.kept(self.poison(own, Queue::Compute));
        if let Some(storage) = self.storage.take() {
            lock(&self.pool.free).entry(storage.bytes()).or_default().insert(storage.address(), storage);
        }
    }
}
