//! [`Torch`]: a memory with libtorch's operations. Its [`Memory`] methods delegate to the underlying memory.

use std::sync::Arc;

use fsdp_core::memory::{Arithmetic, Buffer, Category, HostSlice, HostSliceMut, Memory, Usage};
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::backend::{Dropout, Operands, Outcome, Write};
use fsdp_nn::lengths;
use fsdp_nn::op::Op;
use tch::Kind;

use super::error::{Done, Failure};
use super::storage::{In, Out, TorchStorage};
use super::threads;
use crate::ffi::torch::{RawSlice, View};

/// The kernels for operations that have more than one implementation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kernels {
    /// This project's kernels, where the memory has them.
    #[default]
    Fused,
    /// Compositions of ATen's operations, for a model's operations, conversions, sums, squared norms, AdamW and SGD.
    Aten,
}

/// A memory whose operations are computed by libtorch.
#[derive(Debug)]
pub struct Torch<D> {
    storage: Arc<D>,
    kernels: Kernels,
}

impl<D: TorchStorage> Torch<D> {
    /// Creates a memory that computes in `storage`.
    pub fn new(storage: Arc<D>, kernels: Kernels) -> Self {
        Self { storage, kernels }
    }

    /// The underlying memory.
    pub fn storage(&self) -> &D {
        &self.storage
    }

    /// Runs an operation with the memory's own kernels, if it has any and [`Kernels::Aten`] is not selected.
    pub(super) fn execute_fused(
        &self,
        op: &Op,
        operands: Operands<'_, '_, D::Buffer>,
    ) -> Result<Outcome, Error> {
        match self.kernels {
            Kernels::Fused => self.storage.execute(op, operands),
            Kernels::Aten => Ok(Outcome::Unsupported),
        }
    }

    /// Whether the memory's own kernels are used where they exist.
    pub(super) fn uses_fused_kernels(&self) -> bool {
        self.kernels == Kernels::Fused
    }

    /// Dropout factors from the memory's kernel; `None` if it has none or [`Kernels::Aten`] is selected.
    pub(super) fn dropout_factors(
        &self,
        runs: Dropout<'_>,
        firsts: &[u64],
        dtype: DType,
        run_len: usize,
    ) -> Result<Option<D::Buffer>, Error> {
        match self.kernels {
            Kernels::Fused => self.storage.dropout_factors(runs, firsts, dtype, run_len),
            Kernels::Aten => Ok(None),
        }
    }

    /// Whether ATen must compute an operation that the memory has kernels for too: [`Kernels::Aten`] is selected, and
    /// all buffers are on the memory's device.
    pub(super) fn must_compose(&self, buffers: &[&D::Buffer]) -> bool {
        self.kernels == Kernels::Aten && buffers.iter().all(|buffer| self.storage.is_on_device(buffer))
    }

    /// Runs an operation of libtorch on a queue.
    pub(super) fn in_torch<T>(
        &self,
        queue: Queue,
        operation: &'static str,
        body: impl FnOnce() -> Result<T, Failure>,
    ) -> Result<T, Error> {
        threads::prepare();
        self.storage.enter(queue)?;
        body().map_err(|failure| failure.of(operation, &self.storage.usage()))
    }

    /// A range as a dense tensor.
    pub(super) fn view<'a>(&self, slice: In<'a, D>, sizes: &[i64]) -> Result<View<'a>, Failure> {
        self.view_strided(slice, sizes, &dense_strides(sizes))
    }

    /// A range as a tensor with the given strides.
    pub(super) fn view_strided<'a>(
        &self,
        slice: In<'a, D>,
        sizes: &[i64],
        strides: &[i64],
    ) -> Result<View<'a>, Failure> {
        Ok(self.raw_slice(Queue::Compute, slice)?.view(sizes, strides)?)
    }

    /// A range to be written, as a dense tensor.
    pub(super) fn view_mut<'a>(&self, slice: Out<'a, D>, sizes: &[i64]) -> Result<View<'a>, Failure> {
        self.view_mut_strided(slice, sizes, &dense_strides(sizes))
    }

    /// A range to be written, as a tensor with the given strides.
    pub(super) fn view_mut_strided<'a>(
        &self,
        slice: Out<'a, D>,
        sizes: &[i64],
        strides: &[i64],
    ) -> Result<View<'a>, Failure> {
        Ok(self.raw_slice_mut(Queue::Compute, slice)?.view(sizes, strides)?)
    }

    /// The location of a range, for work on a queue.
    pub(super) fn raw_slice<'a>(&self, queue: Queue, slice: In<'a, D>) -> Result<RawSlice<'a>, Failure> {
        let address = self.storage.address(queue, slice)?;
        Ok(RawSlice::new(address, slice.len, kind(slice.buffer.dtype()), self.storage.device()))
    }

    /// The location of a range to be written, for work on a queue.
    pub(super) fn raw_slice_mut<'a>(&self, queue: Queue, slice: Out<'a, D>) -> Result<RawSlice<'a>, Failure> {
        let (len, kind) = (slice.len, kind(slice.buffer.dtype()));
        let address = self.storage.address_mut(queue, slice)?;
        Ok(RawSlice::new(address, len, kind, self.storage.device()))
    }

    /// The destination of a gradient, as a dense tensor.
    pub(super) fn target<'a>(
        &self,
        target: Write<'a, D::Buffer>,
        sizes: &[i64],
    ) -> Result<Target<'a>, Failure> {
        Ok(Target { slot: self.view_mut(target.slice, sizes)?, accumulate: target.accumulate })
    }
}

/// The destination of a gradient.
pub(super) struct Target<'a> {
    pub(super) slot: View<'a>,
    pub(super) accumulate: bool,
}

impl Target<'_> {
    /// Writes or adds a gradient given in the arithmetic type; rounds once.
    pub(super) fn put(mut self, gradient: &tch::Tensor) -> Result<(), Failure> {
        if self.accumulate {
            self.slot.f_add_(gradient).done()?;
        } else {
            self.slot.f_copy_(gradient)?;
        }
        Ok(())
    }
}

/// The strides of a dense tensor.
fn dense_strides(sizes: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; sizes.len()];
    for dim in (1..sizes.len()).rev() {
        strides[dim - 1] = strides[dim] * sizes[dim].max(1);
    }
    strides
}

/// libtorch's kind for a dtype. Its unsigned integers cannot be used as indices, so ids are reinterpreted as signed: no
/// id is that large, except the ignored target, which becomes -1.
pub(super) fn kind(dtype: DType) -> Kind {
    match dtype {
        DType::F32 => Kind::Float,
        DType::F64 => Kind::Double,
        DType::Bf16 => Kind::BFloat16,
        DType::F16 => Kind::Half,
        DType::U8 => Kind::Uint8,
        DType::U32 => Kind::Int,
        DType::I64 => Kind::Int64,
    }
}

/// The arithmetic type for a float dtype.
pub(super) fn arithmetic(dtype: DType) -> Result<Kind, Error> {
    match dtype {
        DType::F32 | DType::Bf16 | DType::F16 => Ok(Kind::Float),
        DType::F64 => Ok(Kind::Double),
        other => lengths::not_a_float(other),
    }
}

impl<D: TorchStorage> Memory for Torch<D> {
    type Buffer = D::Buffer;
    type Event = D::Event;

    fn allocate(&self, category: Category, dtype: DType, len: usize) -> Result<D::Buffer, Error> {
        self.storage.allocate(category, dtype, len)
    }

    fn allocate_host(&self, category: Category, dtype: DType, len: usize) -> Result<D::Buffer, Error> {
        self.storage.allocate_host(category, dtype, len)
    }

    fn host_bytes(buffer: &D::Buffer) -> Option<Result<&[u8], Error>> {
        D::host_bytes(buffer)
    }

    fn host_bytes_mut(buffer: &mut D::Buffer) -> Option<Result<&mut [u8], Error>> {
        D::host_bytes_mut(buffer)
    }

    fn release(&self, queue: Queue, buffer: &mut D::Buffer) {
        self.storage.release(queue, buffer);
    }

    fn alias(&self, dst: &mut D::Buffer, src: &D::Buffer) -> bool {
        self.storage.alias(dst, src)
    }

    fn zero(&self, queue: Queue, dst: Out<'_, D>) -> Result<(), Error> {
        self.storage.zero(queue, dst)
    }

    fn copy(&self, queue: Queue, src: In<'_, D>, dst: Out<'_, D>) -> Result<(), Error> {
        let (from, to) = (src.buffer.dtype(), dst.buffer.dtype());
        let converts = from != to && from.is_float() && to.is_float();
        // libtorch rounds twice when it converts f64 to bf16 or f16.
        let rounds_once = from != DType::F64 || to.size_bytes() > 2;
        if converts && rounds_once && src.len == dst.len && self.must_compose(&[src.buffer, dst.buffer]) {
            return self.in_torch(queue, "copy", || self.aten_copy(queue, src, dst));
        }
        self.storage.copy(queue, src, dst)
    }

    fn compute(
        &self,
        queue: Queue,
        operation: Arithmetic<'_, In<'_, D>>,
        dst: Out<'_, D>,
    ) -> Result<(), Error> {
        let composes = match operation {
            Arithmetic::Accumulate(src)
            | Arithmetic::SquareSum(src, _)
            | Arithmetic::ExactSum(src)
            | Arithmetic::AddCounts(src) => self.must_compose(&[src.buffer, dst.buffer]),
            Arithmetic::Scale(_) => self.must_compose(&[dst.buffer]),
            Arithmetic::GradientFactors { .. } => false,
        };
        if composes {
            operation.check(&dst);
            return self.in_torch(queue, "arithmetic", || self.aten_arithmetic(queue, operation, dst));
        }
        self.storage.compute(queue, operation, dst)
    }

    fn write(&self, queue: Queue, src: HostSlice<'_>, dst: Out<'_, D>) -> Result<(), Error> {
        self.storage.write(queue, src, dst)
    }

    fn read(&self, queue: Queue, src: In<'_, D>, dst: HostSliceMut<'_>) -> Result<(), Error> {
        self.storage.read(queue, src, dst)
    }

    fn record(&self, queue: Queue) -> D::Event {
        self.storage.record(queue)
    }

    fn wait(&self, queue: Queue, event: &D::Event) {
        self.storage.wait(queue, event);
    }

    fn is_asynchronous(&self) -> bool {
        self.storage.is_asynchronous()
    }

    fn usage(&self) -> Usage {
        self.storage.usage()
    }
}
