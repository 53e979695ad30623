//! Checks of the arguments of operations, the same for memory that computes and memory that only counts.

use fsdp_core::memory::{Category, HostSlice, HostSliceMut};
use fsdp_core::scalars::{GradientFactors, SCALAR_WORDS};
use fsdp_core::{DType, Error, ExactSum};

/// An error about a length.
pub fn expect(what: &'static str, got: usize, expected: usize) -> Result<(), Error> {
    if got == expected {
        return Ok(());
    }
    Err(Error::Memory { category: None, what: format!("{what}: {got}, but {expected} are needed") })
}

/// That `total` is a whole number of rows of `row_len`.
pub fn expect_rows(what: &'static str, row_len: usize, total: usize) -> Result<(), Error> {
    if row_len > 0 && total.is_multiple_of(row_len) {
        return Ok(());
    }
    let what = format!("{what}: {total} is not a multiple of {row_len}");
    Err(Error::Memory { category: None, what })
}

/// Lengths of a sum of squares by rows, into an exact sum.
pub fn square_sum(src: usize, row_len: usize, words: usize) -> Result<(), Error> {
    expect_rows("elements of the rows of a square sum", row_len, src)?;
    expect("words of an exact sum", words, ExactSum::WORDS)
}

/// Lengths of a step's scalars and of the factors derived from them.
pub fn gradient_factors(scalars: usize, factors: usize) -> Result<(), Error> {
    expect("words of a step's scalars", scalars, SCALAR_WORDS)?;
    expect("gradient factors", factors, GradientFactors::LEN)
}

/// The error for a dtype that is not a float.
pub fn not_a_float(dtype: DType) -> Error {
    Error::Memory { category: None, what: format!("this needs a float dtype, not {dtype}") }
}

/// The error for a buffer of the wrong dtype.
pub fn wrong_dtype(category: Category, expected: DType, got: DType) -> Error {
    let what = format!("a buffer of {got} is used where the other operands need {expected}");
    Error::Memory { category: Some(category), what }
}

/// Elements of a host slice.
pub fn of_host(slice: &HostSlice<'_>) -> usize {
    match slice {
        HostSlice::F32(slice) => slice.len(),
        HostSlice::F64(slice) => slice.len(),
        HostSlice::U32(slice) => slice.len(),
        HostSlice::I64(slice) => slice.len(),
    }
}

/// Elements of a writable host slice.
pub fn of_host_mut(slice: &HostSliceMut<'_>) -> usize {
    match slice {
        HostSliceMut::F32(slice) => slice.len(),
        HostSliceMut::F64(slice) => slice.len(),
        HostSliceMut::I64(slice) => slice.len(),
    }
}
