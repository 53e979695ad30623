//! Helpers for tests of model operations, in addition to those of `values`.

use fsdp_core::memory::{HostSlice, Memory, SliceMut};
use fsdp_core::{DType, Queue};

use crate::subject::EXPONENTIAL_OF_HOST;
use crate::values::{assert_bits, assert_within, filled, host, room, unit, values};

/// Creates a u32 buffer with these token ids.
pub(crate) fn ids<M: Memory>(memory: &M, values: &[u32]) -> M::Buffer {
    let mut buffer = room(memory, DType::U32, values.len());
    memory.write(Queue::Compute, HostSlice::U32(values), SliceMut::whole(&mut buffer)).unwrap();
    buffer
}

/// Rounds numbers to a dtype.
pub(crate) fn rounded(dtype: DType, numbers: Vec<f64>) -> Vec<f64> {
    let host = host();
    values(&host, &filled(&host, dtype, &numbers))
}

/// Checks results that depend on exponentials: bit for bit, except in f64 on devices whose exponential is not the
/// host's and differs in the last place; there, within bounds.
#[track_caller]
pub(crate) fn assert_alike(dtype: DType, got: &[f64], expected: &[f64], what: &str) {
    if dtype != DType::F64 || EXPONENTIAL_OF_HOST {
        return assert_bits(got, expected, what);
    }
    let largest = expected.iter().fold(10.0, |a: f64, b| b.abs().max(a));
    assert_within(got, expected, &vec![64.0 * unit(dtype) * largest; expected.len()], what);
}
