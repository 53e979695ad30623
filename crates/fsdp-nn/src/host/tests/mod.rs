//! Tests of the host backend through its public contracts.
//!
//! A [`Case`] is one operation with inputs: forward and backward as functions from numbers to numbers, run
//! by a [`Kit`] that fixes dtype, threads and the offset of operands within their buffers.

mod agreement;
mod cases;
mod gradients;
mod storage;

use fsdp_core::memory::{Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut};
use fsdp_core::program::GradientTarget;
use fsdp_core::{DType, Queue};

use crate::random;
use crate::{HostBuffer, HostMemory, HostOptions};

/// How operations are run.
pub(super) struct Kit {
    memory: HostMemory,
    dtype: DType,
    /// Elements in front of every operand.
    shift: usize,
    /// What gradients are added to; overwritten when absent.
    base: Option<f64>,
    /// Dtype of gradient slots.
    slots: DType,
}

impl Kit {
    fn new(dtype: DType) -> Self {
        Self::with(dtype, 1, 0)
    }

    fn with(dtype: DType, threads: usize, shift: usize) -> Self {
        let options = HostOptions { threads, poison: true, ..HostOptions::default() };
        Self { memory: HostMemory::new(options).unwrap(), dtype, shift, base: None, slots: dtype }
    }

    /// An operand with these values.
    fn put(&self, values: &[f64]) -> Operand {
        self.put_as(self.dtype, values)
    }

    fn put_as(&self, dtype: DType, values: &[f64]) -> Operand {
        let len = values.len();
        let mut operand = self.room(dtype, len);
        self.memory.write(Queue::Compute, HostSlice::F64(values), operand.write()).unwrap();
        operand
    }

    fn ids(&self, values: &[u32]) -> Operand {
        let mut operand = self.room(DType::U32, values.len());
        self.memory.write(Queue::Compute, HostSlice::U32(values), operand.write()).unwrap();
        operand
    }

    /// An operand for results: poisoned.
    fn room(&self, dtype: DType, len: usize) -> Operand {
        let buffer = self.memory.allocate(Category::Activation, dtype, self.shift + len).unwrap();
        Operand { buffer, offset: self.shift, len }
    }

    fn result(&self, len: usize) -> Operand {
        self.room(self.dtype, len)
    }

    fn statistics(&self, len: usize) -> Operand {
        self.room(self.dtype.master(), len)
    }

    /// A gradient slot.
    fn slot(&self, len: usize) -> Operand {
        match self.base {
            Some(base) => self.put_as(self.slots, &vec![base; len]),
            None => self.room(self.slots, len),
        }
    }

    /// An activation gradient that accumulates when slots do.
    fn input_gradient(&self, len: usize) -> Operand {
        match self.base {
            Some(base) => self.put(&vec![base; len]),
            None => self.result(len),
        }
    }

    fn accumulates(&self) -> bool {
        self.base.is_some()
    }

    fn target<'a>(&self, slot: &'a mut Operand) -> GradientTarget<'a, HostBuffer> {
        GradientTarget { slice: slot.write(), accumulate: self.accumulates() }
    }

    fn get(&self, operand: &Operand) -> Vec<f64> {
        let mut values = vec![0.0; operand.len];
        self.memory.read(Queue::Compute, operand.read(), HostSliceMut::F64(&mut values)).unwrap();
        values
    }
}

/// A range of a buffer.
pub(super) struct Operand {
    buffer: HostBuffer,
    offset: usize,
    len: usize,
}

impl Operand {
    fn read(&self) -> Slice<'_, HostBuffer> {
        Slice::new(&self.buffer, self.offset, self.len)
    }

    fn write(&mut self) -> SliceMut<'_, HostBuffer> {
        SliceMut::new(&mut self.buffer, self.offset, self.len)
    }
}

type Forward = Box<dyn Fn(&Kit, &[Vec<f64>]) -> Vec<f64>>;
type Backward = Box<dyn Fn(&Kit, &[Vec<f64>], &[f64]) -> Vec<Vec<f64>>>;
type Bound = Box<dyn Fn(&[Vec<f64>], &[f64]) -> (f64, Vec<f64>)>;

/// One operation with inputs.
pub(super) struct Case {
    name: &'static str,
    /// Differentiable inputs, exact in every dtype.
    inputs: Vec<Vec<f64>>,
    /// The gradient of the outputs.
    doutput: Vec<f64>,
    forward: Forward,
    /// Gradients of all inputs.
    backward: Backward,
    /// Rounding errors of the arithmetic type that an output may gather, and what each is relative to.
    bound: Bound,
}

/// Normally distributed numbers that are exact in bf16.
pub(super) fn numbers(key: u64, len: usize) -> Vec<f64> {
    let exact = |value: f64| half::bf16::from_f64(value).to_f64();
    (0..len as u64).map(|i| exact(random::normal(random::key(&[key]), i))).collect()
}

/// Integers below `end`.
pub(super) fn integers(key: u64, len: usize, end: usize) -> Vec<u32> {
    (0..len as u64).map(|i| (random::uniform(random::key(&[key, 1]), i) * end as f64) as u32).collect()
}
