//! Memory without storage: it runs a model's code to learn what that allocates.
//!
//! Buffers are counted exactly as [`HostMemory`](crate::HostMemory) counts them, operations check their
//! lengths and compute nothing. Reading gives zeros, so code that branches on values it reads must not be
//! predicted this way.

use std::sync::Arc;

use fsdp_core::memory::{Buffer, Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut, Usage};
use fsdp_core::{DType, Error, ExactSum, Queue};

use crate::accounting::{Account, Lease};
use crate::backend::{Backend, HeadChunks, Operands, Outcome};
use crate::lengths;
use crate::op::Op;

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
        lengths::expect("copied elements", src.len, dst.len);
        Ok(())
    }

    fn accumulate(&self, _queue: Queue, src: In<'_>, dst: Out<'_>) -> Result<(), Error> {
        lengths::expect("accumulated elements", src.len, dst.len);
        Ok(())
    }

    fn scale(&self, _queue: Queue, _factor: f64, _dst: Out<'_>) -> Result<(), Error> {
        Ok(())
    }

    fn square_sum(&self, _queue: Queue, src: In<'_>, row_len: usize, sum: Out<'_>) -> Result<(), Error> {
        lengths::square_sum(src.len, row_len, sum.len);
        Ok(())
    }

    fn exact_sum(&self, _queue: Queue, _src: In<'_>, sum: Out<'_>) -> Result<(), Error> {
        lengths::expect("words of an exact sum", sum.len, ExactSum::WORDS);
        Ok(())
    }

    fn gradient_factors(
        &self,
        _queue: Queue,
        scalars: In<'_>,
        _averaged_ranks: usize,
        _grad_clip: Option<f64>,
        factors: Out<'_>,
    ) -> Result<(), Error> {
        lengths::gradient_factors(scalars.len, factors.len);
        Ok(())
    }

    fn write(&self, _queue: Queue, src: HostSlice<'_>, dst: Out<'_>) -> Result<(), Error> {
        lengths::expect("written elements", lengths::of_host(&src), dst.len);
        Ok(())
    }

    fn read(&self, _queue: Queue, src: In<'_>, dst: HostSliceMut<'_>) -> Result<(), Error> {
        lengths::expect("read elements", src.len, lengths::of_host_mut(&dst));
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
    fn execute(&self, op: &Op, _operands: Operands<'_, '_, ShapeBuffer>) -> Result<Outcome, Error> {
        #[cfg(test)]
        if matches!(op, Op::Linear { .. } | Op::Attention { .. }) {
            self.count_product();
        }
        let _ = op;
        Ok(Outcome::Done)
    }

    fn head_chunks(&self) -> HeadChunks {
        self.head_chunks
    }
}
