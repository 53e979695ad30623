//! Memory without storage: it runs a model's code to learn what that allocates.
//!
//! Buffers are counted exactly as [`HostMemory`](crate::HostMemory) counts them, operations check their
//! lengths and compute nothing. Reading gives zeros, so code that branches on values it reads must not be
//! predicted this way.

use std::sync::Arc;

use fsdp_core::memory::{Buffer, Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut, Usage};
use fsdp_core::program::GradientTarget;
use fsdp_core::{DType, Error, ExactSum, Queue};

use crate::accounting::{Account, Lease};
use crate::backend::{AttentionDims, Backend, Dropout, HeadChunks, HeadDims, LinearDims};
use crate::lengths;

/// A buffer of a [`ShapeMemory`]: a dtype, a length and an entry in the account.
#[derive(Clone, Debug)]
pub struct ShapeBuffer {
    lease: Arc<Lease>,
    dtype: DType,
    len: usize,
}

impl Buffer for ShapeBuffer {
    fn len(&self) -> usize {
        self.len
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn is_exclusive(&self) -> bool {
        Arc::strong_count(&self.lease) == 1
    }
}

/// The account of one rank, without memory behind it.
#[derive(Debug, Default)]
pub struct ShapeMemory {
    account: Arc<Account>,
    head_chunks: HeadChunks,
    /// Linear maps and attentions, forward, so far.
    #[cfg(test)]
    products: std::sync::atomic::AtomicUsize,
}

impl ShapeMemory {
    /// A memory that counts from zero, with the chunks of logits of the backend that it stands for.
    pub fn new(head_chunks: HeadChunks) -> Self {
        Self { head_chunks, ..Self::default() }
    }

    /// Forgets the peaks of [`Memory::usage`]: what is in use now is the new peak.
    pub fn reset_peaks(&self) {
        self.account.reset_peaks();
    }

    /// Linear maps and attentions, forward, so far.
    #[cfg(test)]
    pub(crate) fn products(&self) -> usize {
        self.products.load(std::sync::atomic::Ordering::Relaxed)
    }

    #[cfg(test)]
    fn count_product(&self) {
        self.products.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }
}

type In<'a> = Slice<'a, ShapeBuffer>;
type Out<'a> = SliceMut<'a, ShapeBuffer>;
type Gradient<'a> = GradientTarget<'a, ShapeBuffer>;

impl Memory for ShapeMemory {
    type Buffer = ShapeBuffer;
    type Event = ();

    fn allocate(&self, category: Category, dtype: DType, len: usize) -> Result<ShapeBuffer, Error> {
        Ok(ShapeBuffer { lease: self.account.open(category, dtype, len), dtype, len })
    }

    fn allocate_host(&self, category: Category, dtype: DType, len: usize) -> Result<ShapeBuffer, Error> {
        Ok(ShapeBuffer { lease: self.account.open_host(category, dtype, len), dtype, len })
    }

    fn release(&self, _queue: Queue, _buffer: &mut ShapeBuffer) {}

    fn alias(&self, dst: &mut ShapeBuffer, src: &ShapeBuffer) -> bool {
        dst.dtype == src.dtype && dst.len == src.len
    }

    fn zero(&self, _queue: Queue, _dst: Out<'_>) -> Result<(), Error> {
        Ok(())
    }

    fn copy(&self, _queue: Queue, src: In<'_>, dst: Out<'_>) -> Result<(), Error> {
        lengths::expect("copied elements", src.len, dst.len)
    }

    fn accumulate(&self, _queue: Queue, src: In<'_>, dst: Out<'_>) -> Result<(), Error> {
        lengths::expect("accumulated elements", src.len, dst.len)
    }

    fn scale(&self, _queue: Queue, _factor: f64, _dst: Out<'_>) -> Result<(), Error> {
        Ok(())
    }

    fn square_sum(&self, _queue: Queue, src: In<'_>, row_len: usize, sum: Out<'_>) -> Result<(), Error> {
        lengths::square_sum(src.len, row_len, sum.len)
    }

    fn exact_sum(&self, _queue: Queue, _src: In<'_>, sum: Out<'_>) -> Result<(), Error> {
        lengths::expect("words of an exact sum", sum.len, ExactSum::WORDS)
    }

    fn gradient_factors(
        &self,
        _queue: Queue,
        scalars: In<'_>,
        _grad_clip: Option<f64>,
        factors: Out<'_>,
    ) -> Result<(), Error> {
        lengths::gradient_factors(scalars.len, factors.len)
    }

    fn write(&self, _queue: Queue, src: HostSlice<'_>, dst: Out<'_>) -> Result<(), Error> {
        lengths::expect("written elements", lengths::of_host(&src), dst.len)
    }

    fn read(&self, _queue: Queue, src: In<'_>, dst: HostSliceMut<'_>) -> Result<(), Error> {
        lengths::expect("read elements", src.len, lengths::of_host_mut(&dst))?;
        match dst {
            HostSliceMut::F32(dst) => dst.fill(0.0),
            HostSliceMut::F64(dst) => dst.fill(0.0),
            HostSliceMut::I64(dst) => dst.fill(0),
        }
        Ok(())
    }

    fn record(&self, _queue: Queue) {}

    fn wait(&self, _queue: Queue, _event: &()) {}

    fn usage(&self) -> Usage {
        self.account.usage()
    }
}

impl Backend for ShapeMemory {
    fn linear(
        &self,
        dims: LinearDims,
        x: In<'_>,
        weight: In<'_>,
        bias: Option<In<'_>>,
        y: Out<'_>,
    ) -> Result<(), Error> {
        #[cfg(test)]
        self.count_product();
        lengths::linear(dims, Some(x.len), Some(weight.len), bias.map(|bias| bias.len), y.len)
    }

    fn linear_backward_input(
        &self,
        dims: LinearDims,
        dy: In<'_>,
        weight: In<'_>,
        dx: Out<'_>,
        _accumulate: bool,
    ) -> Result<(), Error> {
        lengths::linear(dims, Some(dx.len), Some(weight.len), None, dy.len)
    }

    fn linear_backward_weight(
        &self,
        dims: LinearDims,
        x: In<'_>,
        dy: In<'_>,
        dweight: Gradient<'_>,
    ) -> Result<(), Error> {
        lengths::linear(dims, Some(x.len), Some(dweight.slice.len), None, dy.len)
    }

    fn linear_backward_bias(&self, dims: LinearDims, dy: In<'_>, dbias: Gradient<'_>) -> Result<(), Error> {
        lengths::linear(dims, None, None, Some(dbias.slice.len), dy.len)
    }

    fn embedding(
        &self,
        width: usize,
        ids: In<'_>,
        table: In<'_>,
        y: Out<'_>,
        _add: bool,
    ) -> Result<(), Error> {
        lengths::embedding(width, ids.len, table.len, y.len)
    }

    fn embedding_backward(
        &self,
        width: usize,
        ids: In<'_>,
        dy: In<'_>,
        dtable: Gradient<'_>,
    ) -> Result<(), Error> {
        lengths::embedding(width, ids.len, dtable.slice.len, dy.len)
    }

    fn rms_norm(
        &self,
        width: usize,
        _eps: f64,
        x: In<'_>,
        weight: In<'_>,
        y: Out<'_>,
        rstd: Out<'_>,
    ) -> Result<(), Error> {
        lengths::norm(width, &[x.len, y.len], &[weight.len], rstd.len, 1)
    }

    fn rms_norm_backward(
        &self,
        width: usize,
        x: In<'_>,
        weight: In<'_>,
        rstd: In<'_>,
        dy: In<'_>,
        dx: Out<'_>,
        _accumulate: bool,
        dweight: Option<Gradient<'_>>,
    ) -> Result<(), Error> {
        let dweight_len = dweight.map_or(width, |target| target.slice.len);
        lengths::norm(width, &[x.len, dy.len, dx.len], &[weight.len, dweight_len], rstd.len, 1)
    }

    fn layer_norm(
        &self,
        width: usize,
        _eps: f64,
        x: In<'_>,
        weight: In<'_>,
        bias: In<'_>,
        y: Out<'_>,
        stats: Out<'_>,
    ) -> Result<(), Error> {
        lengths::norm(width, &[x.len, y.len], &[weight.len, bias.len], stats.len, 2)
    }

    fn layer_norm_backward_input(
        &self,
        width: usize,
        x: In<'_>,
        weight: In<'_>,
        stats: In<'_>,
        dy: In<'_>,
        dx: Out<'_>,
        _accumulate: bool,
    ) -> Result<(), Error> {
        lengths::norm(width, &[x.len, dy.len, dx.len], &[weight.len], stats.len, 2)
    }

    fn layer_norm_backward_weight(
        &self,
        width: usize,
        x: In<'_>,
        stats: In<'_>,
        dy: In<'_>,
        dweight: Gradient<'_>,
    ) -> Result<(), Error> {
        lengths::norm(width, &[x.len, dy.len], &[dweight.slice.len], stats.len, 2)
    }

    fn rope(
        &self,
        dims: AttentionDims,
        inverse_frequencies: &[f32],
        qkv: Out<'_>,
        _backward: bool,
    ) -> Result<(), Error> {
        lengths::attention(dims, None, &[qkv.len], &[], None)?;
        lengths::rope(dims, inverse_frequencies.len())
    }

    fn attention(
        &self,
        dims: AttentionDims,
        dropout: Option<Dropout<'_>>,
        qkv: In<'_>,
        y: Out<'_>,
        lse: Out<'_>,
    ) -> Result<(), Error> {
        #[cfg(test)]
        self.count_product();
        lengths::attention(dims, dropout, &[qkv.len], &[y.len], Some(lse.len))
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
        lengths::attention(dims, dropout, &[qkv.len, dqkv.len], &[y.len, dy.len], Some(lse.len))
    }

    fn swiglu(&self, gate: In<'_>, up: In<'_>, y: Out<'_>) -> Result<(), Error> {
        lengths::expect_equal("elements of swiglu", &[gate.len, up.len, y.len])
    }

    fn swiglu_backward(
        &self,
        gate: In<'_>,
        up: In<'_>,
        dy: In<'_>,
        dgate: Out<'_>,
        dup: Out<'_>,
    ) -> Result<(), Error> {
        lengths::expect_equal("elements of swiglu", &[gate.len, up.len, dy.len, dgate.len, dup.len])
    }

    fn gelu(&self, x: In<'_>, y: Out<'_>) -> Result<(), Error> {
        lengths::expect_equal("elements of gelu", &[x.len, y.len])
    }

    fn gelu_backward(&self, x: In<'_>, dy: In<'_>, dx: Out<'_>) -> Result<(), Error> {
        lengths::expect_equal("elements of gelu", &[x.len, dy.len, dx.len])
    }

    fn add(&self, a: In<'_>, b: In<'_>, y: Out<'_>) -> Result<(), Error> {
        lengths::expect_equal("elements of a sum", &[a.len, b.len, y.len])
    }

    fn dropout(&self, dropout: Dropout<'_>, x: Out<'_>) -> Result<(), Error> {
        lengths::dropout(dropout, x.len)
    }

    fn head_chunks(&self) -> HeadChunks {
        self.head_chunks
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
        lengths::head(dims, x.len, weight.len, Some((targets.len, losses.len)), logits.len, None)
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
        let gradients = Some((dx.len, dweight.map(|target| target.slice.len)));
        lengths::head(dims, x.len, weight.len, Some((targets.len, losses.len)), logits.len, gradients)
    }

    fn head_logits(&self, dims: HeadDims, x: In<'_>, weight: In<'_>, logits: Out<'_>) -> Result<(), Error> {
        lengths::head(dims, x.len, weight.len, None, logits.len, None)
    }
}
