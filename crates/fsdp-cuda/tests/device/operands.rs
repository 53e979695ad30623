//! What only tests of a model's operations need beside numbers.

use fsdp_core::memory::{HostSlice, Memory, SliceMut};
use fsdp_core::{DType, Queue};

use crate::subject::EXPONENTIAL_OF_HOST;
use crate::values::{assert_bits, assert_within, filled, host, room, unit, values};

/// A buffer with these token ids.
pub(crate) fn ids<M: Memory>(memory: &M, values: &[u32]) -> M::Buffer {
    let mut buffer = room(memory, DType::U32, values.len());
    memory.write(Queue::Compute, HostSlice::U32(values), SliceMut::whole(&mut buffer)).unwrap();
    buffer
}

/// Numbers rounded to a dtype.
pub(crate) fn rounded(dtype: DType, numbers: Vec<f64>) -> Vec<f64> {
    let host = host();
    values(&host, &filled(&host, dtype, &numbers))
}

/// Equal numbers of a computation with exponentials: bit for bit, but in double precision only where the device has the
/// exponential of the host, whose last place differs elsewhere.
#[track_caller]
pub(crate) fn assert_alike(dtype: DType, got: &[f64], expected: &[f64], what: &str) {
    if dtype != DType::F64 || EXPONENTIAL_OF_HOST {
        return assert_bits(got, expected, what);
    }
    let largest = expected.iter().fold(10.0, |a: f64, b| b.abs().max(a));
    assert_within(got, expected, &vec![64.0 * unit(dtype) * largest; expected.len()], what);
}
