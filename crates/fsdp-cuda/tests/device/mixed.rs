//! A backend for whole runs on the fake driver. The device runs operations that have a kernel in this project; the
//! host's kernels run the others, which on a real device are libtorch's, directly in the memory of the fake, once the
//! earlier work of the compute queue is done.

#![allow(unsafe_code)]

use std::sync::{Arc, Mutex, PoisonError};

use fsdp_core::memory::{
    Arithmetic, Buffer, Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut, Usage,
};
use fsdp_core::update::{SegmentShard, Stage, StepScalars};
use fsdp_core::{DType, Error, Queue};
use fsdp_cuda::device::{CudaEvent, StreamHandle};
use fsdp_cuda::{CudaBuffer, CudaMemory, DeviceMemory};
use fsdp_nn::backend::{Backend, HeadChunks, Operands, Outcome, Write};
use fsdp_nn::host::{HostBlock, HostBlocks};
use fsdp_nn::op::Op;
use fsdp_nn::update::Part;
use fsdp_nn::{HostBuffer, HostMemory, HostOptions, HostPool};

type In<'a> = Slice<'a, CudaBuffer>;
type Out<'a> = SliceMut<'a, CudaBuffer>;

/// A device whose memory the host's kernels can access.
pub(crate) struct Mixed {
    pub(crate) cuda: CudaMemory,
    /// The choice of the device that the run file names.
    pub(crate) head_chunks: HeadChunks,
    host: HostMemory,
    next: Arc<Next>,
}

/// Address that the next buffer of the host memory gets.
#[derive(Debug, Default)]
struct Next(Mutex<u64>);

#[derive(Debug)]
struct There {
    address: u64,
    bytes: usize,
}

impl HostBlocks for Next {
    fn allocate(&self, _: Category, bytes: usize) -> Result<Box<dyn HostBlock>, Error> {
        let address = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Box::new(There { address, bytes }))
    }
}

impl HostBlock for There {
    fn bytes(&self) -> &[u8] {
        // SAFETY: the fake's memory is host memory; the range is in a live buffer that the fake does not use now.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, self.bytes) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `bytes`, and nothing else accesses the range now.
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut u8, self.bytes) }
    }
}

impl Mixed {
    pub(crate) fn new(cuda: CudaMemory) -> Self {
        let next = Arc::<Next>::default();
        let pool = HostPool::of_blocks(Arc::clone(&next) as Arc<dyn HostBlocks>);
        let host = HostMemory::new(HostOptions { pool, ..HostOptions::default() }).unwrap();
        Self { cuda, head_chunks: HeadChunks::Small, host, next }
    }

    /// Returns a readable range as a host buffer.
    fn of(&self, slice: In<'_>) -> Result<HostBuffer, Error> {
        let (dtype, len) = (slice.buffer.dtype(), slice.len);
        self.at(self.cuda.pointer(Queue::Compute, slice)?, dtype, len)
    }

    /// Returns a writable range as a host buffer.
    fn of_mut(&self, slice: Out<'_>) -> Result<HostBuffer, Error> {
        let (dtype, len) = (slice.buffer.dtype(), slice.len);
        self.at(self.cuda.pointer_mut(Queue::Compute, slice)?, dtype, len)
    }

    fn at(&self, address: u64, dtype: DType, len: usize) -> Result<HostBuffer, Error> {
        self.cuda.synchronize(Queue::Compute)?;
        *self.next.0.lock().unwrap_or_else(PoisonError::into_inner) = address;
        let mut buffer = self.host.allocate(Category::Workspace, dtype, len)?;
        self.host.bytes_mut(SliceMut::whole(&mut buffer))?;
        Ok(buffer)
    }
}

impl Memory for Mixed {
    type Buffer = CudaBuffer;
    type Event = CudaEvent;

    fn allocate(&self, category: Category, dtype: DType, len: usize) -> Result<CudaBuffer, Error> {
        self.cuda.allocate(category, dtype, len)
    }

    fn allocate_host(&self, category: Category, dtype: DType, len: usize) -> Result<CudaBuffer, Error> {
        self.cuda.allocate_host(category, dtype, len)
    }

    fn release(&self, queue: Queue, buffer: &mut CudaBuffer) {
        self.cuda.release(queue, buffer);
    }

    fn alias(&self, dst: &mut CudaBuffer, src: &CudaBuffer) -> bool {
        self.cuda.alias(dst, src)
    }

    fn zero(&self, queue: Queue, dst: Out<'_>) -> Result<(), Error> {
        self.cuda.zero(queue, dst)
    }

    fn copy(&self, queue: Queue, src: In<'_>, dst: Out<'_>) -> Result<(), Error> {
        self.cuda.copy(queue, src, dst)
    }

    fn compute(&self, queue: Queue, operation: Arithmetic<'_, In<'_>>, dst: Out<'_>) -> Result<(), Error> {
        self.cuda.compute(queue, operation, dst)
    }

    fn write(&self, queue: Queue, src: HostSlice<'_>, dst: Out<'_>) -> Result<(), Error> {
        self.cuda.write(queue, src, dst)
    }

    fn read(&self, queue: Queue, src: In<'_>, dst: HostSliceMut<'_>) -> Result<(), Error> {
        self.cuda.read(queue, src, dst)
    }

    fn record(&self, queue: Queue) -> CudaEvent {
        self.cuda.record(queue)
    }

    fn wait(&self, queue: Queue, event: &CudaEvent) {
        self.cuda.wait(queue, event);
    }

    fn is_asynchronous(&self) -> bool {
        self.cuda.is_asynchronous()
    }

    fn usage(&self) -> Usage {
        self.cuda.usage()
    }
}

impl DeviceMemory for Mixed {
    fn pointer(&self, queue: Queue, slice: In<'_>) -> Result<u64, Error> {
        self.cuda.pointer(queue, slice)
    }

    fn pointer_mut(&self, queue: Queue, slice: Out<'_>) -> Result<u64, Error> {
        self.cuda.pointer_mut(queue, slice)
    }

    fn stream(&self, queue: Queue) -> StreamHandle {
        self.cuda.stream(queue)
    }

    fn bind(&self) -> Result<(), Error> {
        self.cuda.bind()
    }

    fn is_complete(&self, event: &CudaEvent) -> Result<bool, Error> {
        self.cuda.is_complete(event)
    }
}

impl Backend for Mixed {
    fn head_chunks(&self) -> HeadChunks {
        self.head_chunks
    }

    fn update(
        &self,
        part: &Part,
        stage: &mut Stage<'_, CudaBuffer>,
        shard: &mut SegmentShard<'_, CudaBuffer>,
        scalars: &StepScalars<'_, CudaBuffer>,
    ) -> Result<Outcome, Error> {
        self.cuda.update(part, stage, shard, scalars)
    }

    fn execute(&self, op: &Op, mut operands: Operands<'_, '_, CudaBuffer>) -> Result<Outcome, Error> {
        if self.cuda.execute(op, operands.reborrow())? == Outcome::Done {
            return Ok(Outcome::Done);
        }
        let reads: Vec<_> = operands.reads.iter().map(|slice| self.of(*slice)).collect::<Result<_, _>>()?;
        let reads: Vec<_> = reads.iter().map(Slice::whole).collect();
        let accumulate: Vec<bool> = operands.writes.iter().map(|write| write.accumulate).collect();
        let writes = operands.writes.iter_mut().map(|write| self.of_mut(write.slice.reborrow()));
        let mut writes: Vec<_> = writes.collect::<Result<_, _>>()?;
        let writes = writes.iter_mut().zip(accumulate);
        let mut writes: Vec<_> =
            writes.map(|(buffer, accumulate)| Write { slice: SliceMut::whole(buffer), accumulate }).collect();
        self.host.execute(op, Operands { reads: &reads, writes: &mut writes, batch: operands.batch })
    }
}
