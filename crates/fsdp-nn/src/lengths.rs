//! Argument checks of operations, shared by memory that computes and memory that only counts. Arguments that do not
//! fit are bugs in this project: all checks panic and name the mismatch.

use fsdp_core::memory::{Category, HostSlice, HostSliceMut};
use fsdp_core::scalars::{GradientFactors, SCALAR_WORDS};
use fsdp_core::{DType, ExactSum};

/// Checks that a length is as expected.
#[track_caller]
pub fn expect(what: &'static str, got: usize, expected: usize) {
    assert!(got == expected, "{what}: {got}, but {expected} are needed");
}

/// Checks that `total` is a whole number of rows of `row_len` elements.
#[track_caller]
pub fn expect_rows(what: &'static str, row_len: usize, total: usize) {
    assert!(row_len > 0 && total.is_multiple_of(row_len), "{what}: {total} is not a multiple of {row_len}");
}

/// Checks the lengths of a row-wise sum of squares that is added to an exact sum.
#[track_caller]
pub fn square_sum(src: usize, row_len: usize, words: usize) {
    expect_rows("elements of the rows of a square sum", row_len, src);
    expect("words of an exact sum", words, ExactSum::WORDS);
}

/// Checks the lengths of a step's scalars and of the factors derived from them.
#[track_caller]
pub fn gradient_factors(scalars: usize, factors: usize) {
    expect("words of a step's scalars", scalars, SCALAR_WORDS);
    expect("gradient factors", factors, GradientFactors::LEN);
}

/// Panics because a dtype is not a float.
#[track_caller]
pub fn not_a_float(dtype: DType) -> ! {
    panic!("this needs a float dtype, not {dtype}")
}

/// Panics because a buffer has the wrong dtype.
#[track_caller]
pub fn wrong_dtype(category: Category, expected: DType, got: DType) -> ! {
    panic!("a buffer of {got} for {category} is used where the other operands need {expected}")
}

/// Returns the number of elements of a host slice.
pub fn of_host(slice: &HostSlice<'_>) -> usize {
    match slice {
        HostSlice::F32(slice) => slice.len(),
        HostSlice::F64(slice) => slice.len(),
        HostSlice::U8(slice) => slice.len(),
        HostSlice::U32(slice) => slice.len(),
        HostSlice::I64(slice) => slice.len(),
    }
}

/// Returns the number of elements of a writable host slice.
pub fn of_host_mut(slice: &HostSliceMut<'_>) -> usize {
    match slice {
        HostSliceMut::F32(slice) => slice.len(),
        HostSliceMut::F64(slice) => slice.len(),
        HostSliceMut::U8(slice) => slice.len(),
        HostSliceMut::I64(slice) => slice.len(),
    }
}
