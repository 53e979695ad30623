//! Argument checks of operations, shared by memory that computes and memory that only counts. Arguments that do not
//! fit are bugs in this project: all checks panic and name the mismatch.

use fsdp_core::DType;
use fsdp_core::memory::{Category, HostSlice, HostSliceMut};

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
        HostSliceMut::U32(slice) => slice.len(),
        HostSliceMut::I64(slice) => slice.len(),
    }
}
