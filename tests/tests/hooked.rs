//! A backend whose operations go through a hook that may fail, leak, allocate, or compute something else.

use std::sync::Arc;

use fsdp_core::memory::{Arithmetic, Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut, Usage};
use fsdp_core::update::{SegmentShard, Stage, StepScalars};
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::Backend;
use fsdp_nn::backend::{HeadChunks, Operands, Outcome};
use fsdp_nn::op::Op;
use fsdp_nn::update::Part;

/// Runs an operation on the inner backend, or does something else.
pub(crate) type Hook<M> =
    dyn Fn(&M, &Op, Operands<'_, '_, <M as Memory>::Buffer>) -> Result<Outcome, Error> + Send + Sync;

/// Computes on buffers, or does something else.
type Compute<M> = fn(
    &M,
    Queue,
    Arithmetic<'_, Slice<'_, <M as Memory>::Buffer>>,
    SliceMut<'_, <M as Memory>::Buffer>,
) -> Result<(), Error>;

/// Runs an update rule, or does something else.
type Update<M> = fn(
    &M,
    &Part,
    &mut Stage<'_, <M as Memory>::Buffer>,
    &mut SegmentShard<'_, <M as Memory>::Buffer>,
    &StepScalars<'_, <M as Memory>::Buffer>,
) -> Result<Outcome, Error>;

/// A backend whose operations go through hooks.
pub(crate) struct Hooked<M: Memory> {
    pub(crate) inner: M,
    pub(crate) hook: Arc<Hook<M>>,
    pub(crate) compute: Compute<M>,
    pub(crate) update: Update<M>,
}

impl<M: Backend> Hooked<M> {
    /// A backend whose operations of blocks go through a hook, and all others to the inner backend.
    pub(crate) fn new(inner: M, hook: Arc<Hook<M>>) -> Self {
        Self { inner, hook, compute: M::compute, update: M::update }
    }
}

impl<M: Backend> Backend for Hooked<M> {
    fn execute(&self, op: &Op, operands: Operands<'_, '_, M::Buffer>) -> Result<Outcome, Error> {
        (self.hook)(&self.inner, op, operands)
    }

    fn update(
        &self,
        part: &Part,
        stage: &mut Stage<'_, M::Buffer>,
        shard: &mut SegmentShard<'_, M::Buffer>,
        scalars: &StepScalars<'_, M::Buffer>,
    ) -> Result<Outcome, Error> {
        (self.update)(&self.inner, part, stage, shard, scalars)
    }

    fn head_chunks(&self) -> HeadChunks {
        self.inner.head_chunks()
    }
}

/// Returns the token ids in the bytes of a buffer.
pub(crate) fn ids(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|id| u32::from_le_bytes([id[0], id[1], id[2], id[3]])).collect()
}

/// Derives small integers from token ids: gradients for rows of `width` that sum exactly in every order.
pub(crate) fn integers(ids: &[u32], width: usize) -> Vec<f32> {
    let row = |(row, &id): (usize, &u32)| {
        (0..width as u64)
            .map(move |i| ((u64::from(id) * 5 + (row * width) as u64 * 3 + i * 3) % 7) as f32 - 3.0)
    };
    ids.iter().enumerate().flat_map(row).collect()
}

impl<M: Memory> Memory for Hooked<M> {
    type Buffer = M::Buffer;
    type Event = M::Event;

    fn allocate(&self, category: Category, dtype: DType, len: usize) -> Result<M::Buffer, Error> {
        self.inner.allocate(category, dtype, len)
    }

    fn allocate_host(&self, category: Category, dtype: DType, len: usize) -> Result<M::Buffer, Error> {
        self.inner.allocate_host(category, dtype, len)
    }

    fn release(&self, queue: Queue, buffer: &mut M::Buffer) {
        self.inner.release(queue, buffer);
    }

    fn alias(&self, dst: &mut M::Buffer, src: &M::Buffer) -> bool {
        self.inner.alias(dst, src)
    }

    fn zero(&self, queue: Queue, dst: SliceMut<'_, M::Buffer>) -> Result<(), Error> {
        self.inner.zero(queue, dst)
    }

    fn copy(
        &self,
        queue: Queue,
        src: Slice<'_, M::Buffer>,
        dst: SliceMut<'_, M::Buffer>,
    ) -> Result<(), Error> {
        self.inner.copy(queue, src, dst)
    }

    fn compute(
        &self,
        queue: Queue,
        operation: Arithmetic<'_, Slice<'_, M::Buffer>>,
        dst: SliceMut<'_, M::Buffer>,
    ) -> Result<(), Error> {
        (self.compute)(&self.inner, queue, operation, dst)
    }

    fn write(&self, queue: Queue, src: HostSlice<'_>, dst: SliceMut<'_, M::Buffer>) -> Result<(), Error> {
        self.inner.write(queue, src, dst)
    }

    fn read(&self, queue: Queue, src: Slice<'_, M::Buffer>, dst: HostSliceMut<'_>) -> Result<(), Error> {
        self.inner.read(queue, src, dst)
    }

    fn record(&self, queue: Queue) -> M::Event {
        self.inner.record(queue)
    }

    fn wait(&self, queue: Queue, event: &M::Event) {
        self.inner.wait(queue, event);
    }

    fn is_asynchronous(&self) -> bool {
        self.inner.is_asynchronous()
    }

    fn usage(&self) -> Usage {
        self.inner.usage()
    }
}
