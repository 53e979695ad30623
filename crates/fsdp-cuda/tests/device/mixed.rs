//! A backend for whole runs on the fake driver: operations that have a kernel of ours are given to the device; the
//! others, which a real device would leave to libtorch, are done by the host's kernels right in the memory of the fake,
//! once the compute queue has come so far.

#![allow(unsafe_code)]

use std::sync::{Arc, Mutex, PoisonError};

use fsdp_core::memory::{Buffer, Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut, Usage};
use fsdp_core::program::GradientTarget;
use fsdp_core::update::{Piece, SegmentShard, StateTensor, StepScalars, UpdateRule};
use fsdp_core::{DType, Error, Queue};
use fsdp_cuda::device::CudaEvent;
use fsdp_cuda::{CudaBuffer, CudaMemory, DeviceMemory, FusedOps};
use fsdp_nn::backend::{AttentionDims, Backend, Dropout, HeadDims, LinearDims};
use fsdp_nn::host::{HostBlock, HostBlocks};
use fsdp_nn::update::{Adafactor, AdamW, Sgd};
use fsdp_nn::{HostBuffer, HostMemory, HostOptions, HostPool};

type In<'a> = Slice<'a, CudaBuffer>;
type Out<'a> = SliceMut<'a, CudaBuffer>;
type Gradient<'a> = GradientTarget<'a, CudaBuffer>;

/// A device whose memory the host's kernels can reach.
pub(crate) struct Mixed {
    pub(crate) cuda: CudaMemory,
    host: HostMemory,
    next: Arc<Next>,
}

/// Where the next buffer of the host's memory lies.
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
        // SAFETY: the fake's memory is the host's; the range is of a live buffer that the fake does not use now.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, self.bytes) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `bytes`, and nobody else writes the range now.
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut u8, self.bytes) }
    }
}

impl Mixed {
    pub(crate) fn new(cuda: CudaMemory) -> Self {
        let next = Arc::<Next>::default();
        let pool = HostPool::of_blocks(Arc::clone(&next) as Arc<dyn HostBlocks>);
        let host = HostMemory::new(HostOptions { pool, ..HostOptions::default() }).unwrap();
        Self { cuda, host, next }
    }

    /// A readable range, as a buffer of the host.
    fn of(&self, slice: In<'_>) -> Result<HostBuffer, Error> {
        let (dtype, len) = (slice.buffer.dtype(), slice.len);
        self.at(self.cuda.pointer(Queue::Compute, slice)?, dtype, len)
    }

    /// A writable range, as a buffer of the host.
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

    /// Runs a call of the host with a gradient of the device.
    fn with_target(
        &self,
        gradient: Option<Gradient<'_>>,
        call: impl FnOnce(Option<GradientTarget<'_, HostBuffer>>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let Some(GradientTarget { slice, accumulate }) = gradient else { return call(None) };
        let mut buffer = self.of_mut(slice)?;
        call(Some(GradientTarget { slice: SliceMut::whole(&mut buffer), accumulate }))
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

    fn accumulate(&self, queue: Queue, src: In<'_>, dst: Out<'_>) -> Result<(), Error> {
        self.cuda.accumulate(queue, src, dst)
    }

    fn scale(&self, queue: Queue, factor: f64, dst: Out<'_>) -> Result<(), Error> {
        self.cuda.scale(queue, factor, dst)
    }

    fn square_sum(&self, queue: Queue, src: In<'_>, row_len: usize, sum: Out<'_>) -> Result<(), Error> {
        self.cuda.square_sum(queue, src, row_len, sum)
    }

    fn exact_sum(&self, queue: Queue, src: In<'_>, sum: Out<'_>) -> Result<(), Error> {
        self.cuda.exact_sum(queue, src, sum)
    }

    fn gradient_factors(
        &self,
        queue: Queue,
        scalars: In<'_>,
        averaged_ranks: usize,
        grad_clip: Option<f64>,
        factors: Out<'_>,
    ) -> Result<(), Error> {
        self.cuda.gradient_factors(queue, scalars, averaged_ranks, grad_clip, factors)
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

impl Backend for Mixed {
    fn linear(
        &self,
        dims: LinearDims,
        x: In<'_>,
        weight: In<'_>,
        bias: Option<In<'_>>,
        y: Out<'_>,
    ) -> Result<(), Error> {
        let (x, weight, mut y) = (self.of(x)?, self.of(weight)?, self.of_mut(y)?);
        let bias = bias.map(|bias| self.of(bias)).transpose()?;
        let bias = bias.as_ref().map(Slice::whole);
        self.host.linear(dims, Slice::whole(&x), Slice::whole(&weight), bias, SliceMut::whole(&mut y))
    }

    fn linear_backward_input(
        &self,
        dims: LinearDims,
        dy: In<'_>,
        weight: In<'_>,
        dx: Out<'_>,
        accumulate: bool,
    ) -> Result<(), Error> {
        let (dy, weight, mut dx) = (self.of(dy)?, self.of(weight)?, self.of_mut(dx)?);
        let dx = SliceMut::whole(&mut dx);
        self.host.linear_backward_input(dims, Slice::whole(&dy), Slice::whole(&weight), dx, accumulate)
    }

    fn linear_backward_weight(
        &self,
        dims: LinearDims,
        x: In<'_>,
        dy: In<'_>,
        dweight: Gradient<'_>,
    ) -> Result<(), Error> {
        let (x, dy) = (self.of(x)?, self.of(dy)?);
        self.with_target(Some(dweight), |target| {
            let target = target.expect("one was given");
            self.host.linear_backward_weight(dims, Slice::whole(&x), Slice::whole(&dy), target)
        })
    }

    fn linear_backward_bias(&self, dims: LinearDims, dy: In<'_>, dbias: Gradient<'_>) -> Result<(), Error> {
        let dy = self.of(dy)?;
        self.with_target(Some(dbias), |target| {
            self.host.linear_backward_bias(dims, Slice::whole(&dy), target.expect("one was given"))
        })
    }

    fn embedding(
        &self,
        width: usize,
        ids: In<'_>,
        table: In<'_>,
        y: Out<'_>,
        add: bool,
    ) -> Result<(), Error> {
        let (ids, table, mut y) = (self.of(ids)?, self.of(table)?, self.of_mut(y)?);
        let y = SliceMut::whole(&mut y);
        self.host.embedding(width, Slice::whole(&ids), Slice::whole(&table), y, add)
    }

    fn embedding_backward(
        &self,
        width: usize,
        ids: In<'_>,
        dy: In<'_>,
        dtable: Gradient<'_>,
    ) -> Result<(), Error> {
        let (ids, dy) = (self.of(ids)?, self.of(dy)?);
        self.with_target(Some(dtable), |target| {
            let target = target.expect("one was given");
            self.host.embedding_backward(width, Slice::whole(&ids), Slice::whole(&dy), target)
        })
    }

    fn rms_norm(
        &self,
        width: usize,
        eps: f64,
        x: In<'_>,
        weight: In<'_>,
        y: Out<'_>,
        rstd: Out<'_>,
    ) -> Result<(), Error> {
        self.cuda.rms_norm(width, eps, x, weight, y, rstd)
    }

    fn rms_norm_backward(
        &self,
        width: usize,
        x: In<'_>,
        weight: In<'_>,
        rstd: In<'_>,
        dy: In<'_>,
        dx: Out<'_>,
        accumulate: bool,
        dweight: Option<Gradient<'_>>,
    ) -> Result<(), Error> {
        self.cuda.rms_norm_backward(width, x, weight, rstd, dy, dx, accumulate, dweight)
    }

    fn layer_norm(
        &self,
        width: usize,
        eps: f64,
        x: In<'_>,
        weight: In<'_>,
        bias: In<'_>,
        y: Out<'_>,
        stats: Out<'_>,
    ) -> Result<(), Error> {
        self.cuda.layer_norm(width, eps, x, weight, bias, y, stats)
    }

    fn layer_norm_backward_input(
        &self,
        width: usize,
        x: In<'_>,
        weight: In<'_>,
        stats: In<'_>,
        dy: In<'_>,
        dx: Out<'_>,
        accumulate: bool,
    ) -> Result<(), Error> {
        self.cuda.layer_norm_backward_input(width, x, weight, stats, dy, dx, accumulate)
    }

    fn layer_norm_backward_weight(
        &self,
        width: usize,
        x: In<'_>,
        stats: In<'_>,
        dy: In<'_>,
        dweight: Gradient<'_>,
    ) -> Result<(), Error> {
        self.cuda.layer_norm_backward_weight(width, x, stats, dy, dweight)
    }

    fn rope(
        &self,
        dims: AttentionDims,
        inverse_frequencies: &[f32],
        qkv: Out<'_>,
        backward: bool,
    ) -> Result<(), Error> {
        self.cuda.rope(dims, inverse_frequencies, qkv, backward)
    }

    fn attention(
        &self,
        dims: AttentionDims,
        dropout: Option<Dropout<'_>>,
        qkv: In<'_>,
        y: Out<'_>,
        lse: Out<'_>,
    ) -> Result<(), Error> {
        let (qkv, mut y, mut lse) = (self.of(qkv)?, self.of_mut(y)?, self.of_mut(lse)?);
        let (y, lse) = (SliceMut::whole(&mut y), SliceMut::whole(&mut lse));
        self.host.attention(dims, dropout, Slice::whole(&qkv), y, lse)
    }

    fn attention_backward(
        &self,
        dims: AttentionDims,
        dropout: Option<Dropout<'_>>,
        qkv: In<'_>,
        y: In<'_>,
        lse: In<'_>,
        dy: In<'_>,
        dqkv: Out<'_>,
    ) -> Result<(), Error> {
        let (qkv, y, lse, dy) = (self.of(qkv)?, self.of(y)?, self.of(lse)?, self.of(dy)?);
        let mut dqkv = self.of_mut(dqkv)?;
        let [qkv, y, lse, dy] = [&qkv, &y, &lse, &dy].map(Slice::whole);
        self.host.attention_backward(dims, dropout, qkv, y, lse, dy, SliceMut::whole(&mut dqkv))
    }

    fn swiglu(&self, gate: In<'_>, up: In<'_>, y: Out<'_>) -> Result<(), Error> {
        self.cuda.swiglu(gate, up, y)
    }

    fn swiglu_backward(
        &self,
        gate: In<'_>,
        up: In<'_>,
        dy: In<'_>,
        dgate: Out<'_>,
        dup: Out<'_>,
    ) -> Result<(), Error> {
        self.cuda.swiglu_backward(gate, up, dy, dgate, dup)
    }

    fn swiglu_backward_again(
        &self,
        gate: In<'_>,
        up: In<'_>,
        dy: Out<'_>,
        dgate: Out<'_>,
        dup: Out<'_>,
    ) -> Result<(), Error> {
        self.cuda.swiglu_backward_again(gate, up, dy, dgate, dup)
    }

    fn gelu(&self, x: In<'_>, y: Out<'_>) -> Result<(), Error> {
        self.cuda.gelu(x, y)
    }

    fn gelu_backward(&self, x: In<'_>, dy: In<'_>, dx: Out<'_>) -> Result<(), Error> {
        self.cuda.gelu_backward(x, dy, dx)
    }

    fn gelu_backward_again(&self, x: In<'_>, dy: Out<'_>, dx: Out<'_>) -> Result<(), Error> {
        self.cuda.gelu_backward_again(x, dy, dx)
    }

    fn add(&self, a: In<'_>, b: In<'_>, y: Out<'_>) -> Result<(), Error> {
        let (a, b, mut y) = (self.of(a)?, self.of(b)?, self.of_mut(y)?);
        self.host.add(Slice::whole(&a), Slice::whole(&b), SliceMut::whole(&mut y))
    }

    fn dropout(&self, dropout: Dropout<'_>, x: Out<'_>) -> Result<(), Error> {
        FusedOps::dropout(&self.cuda, dropout, x)
    }

    fn head_loss(
        &self,
        dims: HeadDims,
        x: In<'_>,
        weight: In<'_>,
        targets: In<'_>,
        losses: Out<'_>,
        logits: Out<'_>,
    ) -> Result<(), Error> {
        let (x, weight, targets) = (self.of(x)?, self.of(weight)?, self.of(targets)?);
        let (mut losses, mut logits) = (self.of_mut(losses)?, self.of_mut(logits)?);
        let [x, weight, targets] = [&x, &weight, &targets].map(Slice::whole);
        let (losses, logits) = (SliceMut::whole(&mut losses), SliceMut::whole(&mut logits));
        self.host.head_loss(dims, x, weight, targets, losses, logits)
    }

    fn head_loss_backward(
        &self,
        dims: HeadDims,
        x: In<'_>,
        weight: In<'_>,
        targets: In<'_>,
        losses: Out<'_>,
        logits: Out<'_>,
        _dlogits: Option<Out<'_>>,
        dx: Out<'_>,
        dweight: Option<Gradient<'_>>,
    ) -> Result<(), Error> {
        let (x, weight, targets) = (self.of(x)?, self.of(weight)?, self.of(targets)?);
        let (mut losses, mut logits) = (self.of_mut(losses)?, self.of_mut(logits)?);
        let mut dx = self.of_mut(dx)?;
        let [x, weight, targets] = [&x, &weight, &targets].map(Slice::whole);
        let [losses, logits, dx] = [&mut losses, &mut logits, &mut dx].map(SliceMut::whole);
        self.with_target(dweight, |dweight| {
            self.host.head_loss_backward(dims, x, weight, targets, losses, logits, None, dx, dweight)
        })
    }

    fn head_logits(&self, dims: HeadDims, x: In<'_>, weight: In<'_>, logits: Out<'_>) -> Result<(), Error> {
        let (x, weight, mut logits) = (self.of(x)?, self.of(weight)?, self.of_mut(logits)?);
        self.host.head_logits(dims, Slice::whole(&x), Slice::whole(&weight), SliceMut::whole(&mut logits))
    }
}

macro_rules! rules_of_the_device {
    ($($rule:ty),+) => {$(
        impl UpdateRule<Mixed> for $rule {
            fn state(&self, pieces: &[Piece], shard_len: usize, dtype: DType) -> Vec<StateTensor> {
                UpdateRule::<CudaMemory>::state(self, pieces, shard_len, dtype)
            }

            fn phases(&self) -> Vec<usize> {
                UpdateRule::<CudaMemory>::phases(self)
            }

            fn statistics(
                &mut self,
                memory: &Mixed,
                phase: usize,
                shard: &mut SegmentShard<'_, CudaBuffer>,
                scalars: &StepScalars<'_, CudaBuffer>,
                earlier: &[CudaBuffer],
                sums: &mut CudaBuffer,
            ) -> Result<(), Error> {
                self.statistics(&memory.cuda, phase, shard, scalars, earlier, sums)
            }

            fn update(
                &mut self,
                memory: &Mixed,
                shard: &mut SegmentShard<'_, CudaBuffer>,
                scalars: &StepScalars<'_, CudaBuffer>,
                statistics: &[CudaBuffer],
            ) -> Result<(), Error> {
                self.update(&memory.cuda, shard, scalars, statistics)
            }
        }
    )+};
}

rules_of_the_device!(AdamW, Sgd, Adafactor);
