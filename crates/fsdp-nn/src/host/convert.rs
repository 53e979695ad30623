//! Conversions between elements of host slices and the bytes of a buffer of any dtype, for memory that moves bytes
//! itself.

use bytemuck::{cast_slice, cast_slice_mut};
use fsdp_core::DType;
use fsdp_core::memory::{HostSlice, HostSliceMut};

use super::floats::{Floats, FloatsMut, transfer};

/// Writes elements as `dtype`, converting between float dtypes.
///
/// # Panics
/// If the bytes are not aligned to an element or have the wrong length, or the kinds of dtype differ.
pub fn convert_to(src: HostSlice<'_>, dtype: DType, bytes: &mut [u8]) {
    match src {
        HostSlice::F32(src) => transfer(Floats::F32(src), floats_mut(dtype, bytes), false),
        HostSlice::F64(src) => transfer(Floats::F64(src), floats_mut(dtype, bytes), false),
        HostSlice::U8(src) => same_kind(dtype, DType::U8, || bytes.copy_from_slice(src)),
        HostSlice::U32(src) => same_kind(dtype, DType::U32, || bytes.copy_from_slice(cast_slice(src))),
        HostSlice::I64(src) => same_kind(dtype, DType::I64, || bytes.copy_from_slice(cast_slice(src))),
    }
}

/// Reads elements of `dtype`, converting between float dtypes.
///
/// # Panics
/// As [`convert_to`].
pub fn convert_from(dtype: DType, bytes: &[u8], dst: HostSliceMut<'_>) {
    match dst {
        HostSliceMut::F32(dst) => transfer(floats(dtype, bytes), FloatsMut::F32(dst), false),
        HostSliceMut::F64(dst) => transfer(floats(dtype, bytes), FloatsMut::F64(dst), false),
        HostSliceMut::U8(dst) => same_kind(dtype, DType::U8, || dst.copy_from_slice(bytes)),
        HostSliceMut::U32(dst) => same_kind(dtype, DType::U32, || cast_slice_mut(dst).copy_from_slice(bytes)),
        HostSliceMut::I64(dst) => same_kind(dtype, DType::I64, || cast_slice_mut(dst).copy_from_slice(bytes)),
    }
}

fn same_kind(dtype: DType, expected: DType, copy: impl FnOnce()) {
    assert_eq!(dtype, expected, "integers are not converted");
    copy();
}

fn floats(dtype: DType, bytes: &[u8]) -> Floats<'_> {
    match dtype {
        DType::F32 => Floats::F32(cast_slice(bytes)),
        DType::F64 => Floats::F64(cast_slice(bytes)),
        DType::Bf16 => Floats::Bf16(cast_slice(bytes)),
        DType::F16 => Floats::F16(cast_slice(bytes)),
        other => panic!("{other} is not a float"),
    }
}

fn floats_mut(dtype: DType, bytes: &mut [u8]) -> FloatsMut<'_> {
    match dtype {
        DType::F32 => FloatsMut::F32(cast_slice_mut(bytes)),
        DType::F64 => FloatsMut::F64(cast_slice_mut(bytes)),
        DType::Bf16 => FloatsMut::Bf16(cast_slice_mut(bytes)),
        DType::F16 => FloatsMut::F16(cast_slice_mut(bytes)),
        other => panic!("{other} is not a float"),
    }
}
