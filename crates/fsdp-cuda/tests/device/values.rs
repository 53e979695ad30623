//! Writes numbers to buffers of any memory and reads them back, so that device and host can run the same operations.

use fsdp_core::memory::{Buffer, Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut};
use fsdp_core::{DType, Queue};
use fsdp_nn::{HostMemory, HostOptions, random};

/// The float dtypes.
pub(crate) const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::Bf16, DType::F16];

/// Buffer lengths around the sizes of vectors and warps.
pub(crate) const LENS: [usize; 9] = [0, 1, 3, 8, 31, 33, 256, 1000, 4099];

/// Creates the host memory that results are compared with.
pub(crate) fn host() -> HostMemory {
    HostMemory::new(HostOptions { poison: true, ..HostOptions::default() }).expect("one thread")
}

/// Returns normally distributed numbers.
pub(crate) fn normal(key: u64, len: usize) -> Vec<f64> {
    (0..len as u64).map(|i| random::normal(key, i)).collect()
}

/// Creates a buffer of `shift` unspecified elements followed by these numbers.
pub(crate) fn shifted<M: Memory>(memory: &M, dtype: DType, shift: usize, values: &[f64]) -> M::Buffer {
    let mut buffer = room(memory, dtype, shift + values.len());
    let range = SliceMut::new(&mut buffer, shift, values.len());
    memory.write(Queue::Compute, HostSlice::F64(values), range).unwrap();
    buffer
}

/// Creates a buffer with these numbers.
pub(crate) fn filled<M: Memory>(memory: &M, dtype: DType, values: &[f64]) -> M::Buffer {
    shifted(memory, dtype, 0, values)
}

/// Creates an i64 buffer with these integers.
pub(crate) fn integers<M: Memory>(memory: &M, values: &[i64]) -> M::Buffer {
    let mut buffer = room(memory, DType::I64, values.len());
    memory.write(Queue::Compute, HostSlice::I64(values), SliceMut::whole(&mut buffer)).unwrap();
    buffer
}

/// Allocates a buffer for results.
pub(crate) fn room<M: Memory>(memory: &M, dtype: DType, len: usize) -> M::Buffer {
    memory.allocate(Category::Activation, dtype, len).unwrap()
}

/// Reads a range of a buffer.
pub(crate) fn range<M: Memory>(memory: &M, buffer: &M::Buffer, offset: usize, len: usize) -> Vec<f64> {
    let mut values = vec![0.0; len];
    memory.read_numbers(Queue::Compute, Slice::new(buffer, offset, len), &mut values).unwrap();
    values
}

/// Reads a whole buffer.
pub(crate) fn values<M: Memory>(memory: &M, buffer: &M::Buffer) -> Vec<f64> {
    range(memory, buffer, 0, buffer.len())
}

/// Reads a whole i64 buffer.
pub(crate) fn words<M: Memory>(memory: &M, buffer: &M::Buffer) -> Vec<i64> {
    let mut words = vec![0; buffer.len()];
    memory.read(Queue::Compute, Slice::whole(buffer), HostSliceMut::I64(&mut words)).unwrap();
    words
}

/// Checks that numbers are equal bit for bit; all NaNs are equal.
#[track_caller]
pub(crate) fn assert_bits(got: &[f64], expected: &[f64], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
        let same = got.to_bits() == expected.to_bits() || (got.is_nan() && expected.is_nan());
        assert!(same, "{what}: element {at} is {got:e}, not {expected:e}");
    }
}

/// Checks that each number is within its bound of the expected one.
#[track_caller]
pub(crate) fn assert_within(got: &[f64], expected: &[f64], bounds: &[f64], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (at, ((got, expected), bound)) in got.iter().zip(expected).zip(bounds).enumerate() {
        let error = (got - expected).abs();
        assert!(error <= *bound, "{what}: element {at} is {got:e}, not {expected:e} within {bound:e}");
    }
}

/// The relative error of rounding to a dtype: half a unit in the last place of 1.
pub(crate) fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::Bf16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        DType::F32 => 2f64.powi(-24),
        _ => 2f64.powi(-53),
    }
}
