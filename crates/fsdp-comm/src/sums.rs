//! Adding arrays of elements that are kept as little-endian bytes.

use fsdp_core::DType;

use crate::bf16;

/// `sum[i] += other[i]` for elements of `dtype`: bf16 is added in `f32` and rounded, integers wrap. The
/// additions commute, so it does not matter which operand is the left one.
///
/// # Panics
/// When the lengths differ or are not whole elements.
pub(crate) fn add(dtype: DType, sum: &mut [u8], other: &[u8]) {
    assert_eq!(sum.len(), other.len(), "both operands of a sum have the same length");
    assert!(sum.len().is_multiple_of(dtype.size_bytes()), "operands are whole elements");
    match dtype {
        DType::F32 => each(sum, other, |a, b| (f32::from_le_bytes(a) + f32::from_le_bytes(b)).to_le_bytes()),
        DType::F64 => each(sum, other, |a, b| (f64::from_le_bytes(a) + f64::from_le_bytes(b)).to_le_bytes()),
        DType::Bf16 => each(sum, other, |a, b| {
            let widen = |bytes| bf16::from_bits(u16::from_le_bytes(bytes));
            bf16::to_bits(widen(a) + widen(b)).to_le_bytes()
        }),
        DType::U32 => {
            each(sum, other, |a, b| u32::from_le_bytes(a).wrapping_add(u32::from_le_bytes(b)).to_le_bytes())
        }
        DType::I64 => {
            each(sum, other, |a, b| i64::from_le_bytes(a).wrapping_add(i64::from_le_bytes(b)).to_le_bytes())
        }
    }
}

fn each<const N: usize>(sum: &mut [u8], other: &[u8], add: impl Fn([u8; N], [u8; N]) -> [u8; N]) {
    let (sum, other) = (sum.as_chunks_mut().0, other.as_chunks().0);
    sum.iter_mut().zip(other).for_each(|(a, &b)| *a = add(*a, b));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dtype_adds_its_own_way() {
        let check = |dtype, mut a: Vec<u8>, b: &[u8], expected: &[u8]| {
            add(dtype, &mut a, b);
            assert_eq!(a, expected, "{dtype}");
        };
        check(DType::F32, 1.5f32.to_le_bytes().into(), &2f32.to_le_bytes(), &3.5f32.to_le_bytes());
        check(DType::F64, 1e-9f64.to_le_bytes().into(), &1f64.to_le_bytes(), &(1.0 + 1e-9f64).to_le_bytes());
        let bf16 = |value| bf16::to_bits(value).to_le_bytes();
        check(DType::Bf16, bf16(256.0).into(), &bf16(1.0), &bf16(256.0));
        check(DType::I64, i64::MAX.to_le_bytes().into(), &1i64.to_le_bytes(), &i64::MIN.to_le_bytes());
        check(DType::U32, u32::MAX.to_le_bytes().into(), &2u32.to_le_bytes(), &1u32.to_le_bytes());
    }
}
