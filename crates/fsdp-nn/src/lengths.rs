//! Checks of the arguments of operations, the same for memory that computes and memory that only counts. Arguments that do
//! not fit are bugs of ours: all checks panic and name what differs.

use fsdp_core::memory::{Category, HostSlice, HostSliceMut};
use fsdp_core::scalars::{GradientFactors, SCALAR_WORDS};
use fsdp_core::{DType, ExactSum};

/// That a length is as expected.
#[track_caller]
pub fn expect(what: &'static str, got: usize, expected: usize) {
    assert!(got == expected, "{what}: {got}, but {expected} are needed");
}

/// That `total` is a whole number of rows of `row_len`.
#[track_caller]
pub fn expect_rows(what: &'static str, row_len: usize, total: usize) {
    assert!(row_len > 0 && total.is_multiple_of(row_len), "{what}: {total} is not a multiple of {row_len}");
}

/// Lengths of a sum of squares by rows, into an exact sum.
#[track_caller]
pub fn square_sum(src: usize, row_len: usize, words: usize) {
    expect_rows("elements of the rows of a square sum", row_len, src);
    expect("words of an exact sum", words, ExactSum::WORDS);
}

/// Lengths of a step's scalars and of the factors derived from them.
#[track_caller]
pub fn gradient_factors(scalars: usize, factors: usize) {
    expect("words of a step's scalars", scalars, SCALAR_WORDS);
    expect("gradient factors", factors, GradientFactors::LEN);
}

/// A dtype is not a float.
#[track_caller]
pub fn not_a_float(dtype: DType) -> ! {
    panic!("this needs a float dtype, not {dtype}")
}

/// A buffer has the wrong dtype.
#[track_caller]
pub fn wrong_dtype(category: Category, expected: DType, got: DType) -> ! {
    panic!("a buffer of {got} for {category} is used where the other operands need {expected}")
}

/// Elements of a host slice.
pub fn of_host(slice: &HostSlice<'_>) -> usize {
    match slice {
        HostSlice::F32(slice) => slice.len(),
        HostSlice::F64(slice) => slice.len(),
        HostSlice::U8(slice) => slice.len(),
        HostSlice::U32(slice) => slice.len(),
        HostSlice::I64(slice) => slice.len(),
    }
}

/// Elements of a writable host slice.
pub fn of_host_mut(slice: &HostSliceMut<'_>) -> usize {
    match slice {
        HostSliceMut::F32(slice) => slice.len(),
        HostSliceMut::F64(slice) => slice.len(),
        HostSliceMut::U8(slice) => slice.len(),
        HostSliceMut::I64(slice) => slice.len(),
    }
}
