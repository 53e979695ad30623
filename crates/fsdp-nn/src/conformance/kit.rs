//! Runs operations on plain numbers.
//!
//! A [`Case`] is one operation with inputs: forward and backward as functions, run by a [`Kit`] that fixes the
//! memory, the dtype and the offset of operands within their buffers.

use fsdp_core::memory::{Buffer, Category, HostSlice, HostSliceMut, Slice, SliceMut};
use fsdp_core::program::GradientTarget;
use fsdp_core::{DType, Queue};

use crate::backend::Backend;
use crate::{HostMemory, HostOptions, random};

/// Creates host memory that uses one thread and fills unwritten storage with NaN.
///
/// # Panics
/// Never: no thread is started.
pub fn host() -> HostMemory {
    HostMemory::new(HostOptions { poison: true, ..HostOptions::default() }).unwrap()
}

/// The settings for running operations.
pub(crate) struct Kit<M> {
    pub(crate) memory: M,
    pub(crate) dtype: DType,
    /// Offset of every operand within its buffer, in elements.
    pub(crate) shift: usize,
    /// Initial value of gradients that accumulate; `None` to overwrite.
    pub(crate) base: Option<f64>,
    /// The dtype of gradient slots.
    pub(crate) slots: DType,
}

impl Kit<HostMemory> {
    /// Host memory on one thread, the reference for other backends.
    pub(crate) fn host(dtype: DType) -> Self {
        Self::new(host(), dtype)
    }
}

impl<M: Backend> Kit<M> {
    pub(crate) fn new(memory: M, dtype: DType) -> Self {
        Self { memory, dtype, shift: 0, base: None, slots: dtype }
    }

    /// Returns an operand with these values.
    pub(crate) fn put(&self, values: &[f64]) -> Operand<M::Buffer> {
        self.put_as(self.dtype, values)
    }

    pub(crate) fn put_as(&self, dtype: DType, values: &[f64]) -> Operand<M::Buffer> {
        let len = values.len();
        let mut operand = self.allocate(dtype, len);
        self.memory.write_numbers(Queue::Compute, values, operand.write()).unwrap();
        operand
    }

    pub(crate) fn ids(&self, values: &[u32]) -> Operand<M::Buffer> {
        let mut operand = self.allocate(DType::U32, values.len());
        self.memory.write(Queue::Compute, HostSlice::U32(values), operand.write()).unwrap();
        operand
    }

    /// Returns an operand for results, without contents.
    pub(crate) fn allocate(&self, dtype: DType, len: usize) -> Operand<M::Buffer> {
        let buffer = self.memory.allocate(Category::Activation, dtype, self.shift + len).unwrap();
        Operand { buffer, offset: self.shift, len }
    }

    pub(crate) fn result(&self, len: usize) -> Operand<M::Buffer> {
        self.allocate(self.dtype, len)
    }

    pub(crate) fn statistics(&self, len: usize) -> Operand<M::Buffer> {
        self.allocate(self.dtype.master(), len)
    }

    /// Returns a gradient slot.
    pub(crate) fn slot(&self, len: usize) -> Operand<M::Buffer> {
        match self.base {
            Some(base) => self.put_as(self.slots, &vec![base; len]),
            None => self.allocate(self.slots, len),
        }
    }

    /// Returns an activation gradient that accumulates if slots do.
    pub(crate) fn input_gradient(&self, len: usize) -> Operand<M::Buffer> {
        match self.base {
            Some(base) => self.put(&vec![base; len]),
            None => self.result(len),
        }
    }

    pub(crate) fn accumulates(&self) -> bool {
        self.base.is_some()
    }

    pub(crate) fn target<'a>(&self, slot: &'a mut Operand<M::Buffer>) -> GradientTarget<'a, M::Buffer> {
        GradientTarget { slice: slot.write(), accumulate: self.accumulates() }
    }

    pub(crate) fn get(&self, operand: &Operand<M::Buffer>) -> Vec<f64> {
        let mut values = vec![0.0; operand.len];
        self.memory.read(Queue::Compute, operand.read(), HostSliceMut::F64(&mut values)).unwrap();
        values
    }
}

/// A range of a buffer.
pub(crate) struct Operand<B> {
    buffer: B,
    offset: usize,
    len: usize,
}

impl<B: Buffer> Operand<B> {
    pub(crate) fn read(&self) -> Slice<'_, B> {
        Slice::new(&self.buffer, self.offset, self.len)
    }

    pub(crate) fn write(&mut self) -> SliceMut<'_, B> {
        SliceMut::new(&mut self.buffer, self.offset, self.len)
    }
}

type Forward<M> = Box<dyn Fn(&Kit<M>, &[Vec<f64>]) -> Vec<f64>>;
type Backward<M> = Box<dyn Fn(&Kit<M>, &[Vec<f64>], &[f64]) -> Vec<Vec<f64>>>;
type Bound = Box<dyn Fn(&[Vec<f64>], &[f64]) -> (f64, Vec<f64>)>;

/// One operation with inputs.
pub(crate) struct Case<M> {
    pub(crate) name: &'static str,
    /// Differentiable inputs, exact in every dtype.
    pub(crate) inputs: Vec<Vec<f64>>,
    /// The gradient of the outputs.
    pub(crate) doutput: Vec<f64>,
    pub(crate) forward: Forward<M>,
    /// Computes the gradients of all inputs.
    pub(crate) backward: Backward<M>,
    /// The number of rounding errors of the arithmetic type that an output may accumulate, and the magnitudes they
    /// are relative to.
    pub(crate) bound: Bound,
}

/// Returns normally distributed numbers that are exact in bf16 and in f16.
pub(crate) fn numbers(key: u64, len: usize) -> Vec<f64> {
    let exact = |value: f64| half::f16::from_f64(half::bf16::from_f64(value).to_f64()).to_f64();
    (0..len as u64).map(|i| exact(random::normal(random::key(&[key]), i))).collect()
}

/// Returns integers below `end`.
pub(crate) fn integers(key: u64, len: usize, end: usize) -> Vec<u32> {
    (0..len as u64).map(|i| (random::uniform(random::key(&[key, 1]), i) * end as f64) as u32).collect()
}
