//! Adds and scales arrays of elements stored as little-endian bytes.

use fsdp_core::DType;

use half::{bf16, f16};

/// `sum[i] += other[i]` for elements of `dtype`: bf16 and f16 are added in `f32` and rounded, integers wrap. The
/// additions commute, so the order of the two operands does not matter.
///
/// # Panics
/// Panics if the lengths differ or are not a multiple of the element size.
pub(crate) fn add(dtype: DType, sum: &mut [u8], other: &[u8]) {
    assert_eq!(sum.len(), other.len(), "both operands of a sum have the same length");
    assert!(sum.len().is_multiple_of(dtype.size_bytes()), "operands are whole elements");
    match dtype {
        DType::F32 => {
            combine_elements(sum, other, |a, b| (f32::from_le_bytes(a) + f32::from_le_bytes(b)).to_le_bytes())
        }
        DType::F64 => {
            combine_elements(sum, other, |a, b| (f64::from_le_bytes(a) + f64::from_le_bytes(b)).to_le_bytes())
        }
        DType::Bf16 => combine_elements(sum, other, |a, b| {
            (bf16::from_le_bytes(a) + bf16::from_le_bytes(b)).to_le_bytes()
        }),
        DType::F16 => {
            combine_elements(sum, other, |a, b| (f16::from_le_bytes(a) + f16::from_le_bytes(b)).to_le_bytes())
        }
        DType::U32 => combine_elements(sum, other, |a, b| {
            u32::from_le_bytes(a).wrapping_add(u32::from_le_bytes(b)).to_le_bytes()
        }),
        DType::U8 => panic!("bytes are quantized state, which is not added"),
        DType::I64 => combine_elements(sum, other, |a, b| {
            i64::from_le_bytes(a).wrapping_add(i64::from_le_bytes(b)).to_le_bytes()
        }),
    }
}

/// `elements[i] *= factor` for floats of `dtype`, to which the factor is rounded first: bf16 and f16 are multiplied in
/// `f32` and rounded.
///
/// # Panics
/// Panics if the elements are integers, or if the length is not a multiple of the element size.
pub(crate) fn scale(dtype: DType, factor: f64, elements: &mut [u8]) {
    assert!(elements.len().is_multiple_of(dtype.size_bytes()), "whole elements are scaled");
    match dtype {
        DType::F32 => map_elements(elements, |x| (f32::from_le_bytes(x) * factor as f32).to_le_bytes()),
        DType::F64 => map_elements(elements, |x| (f64::from_le_bytes(x) * factor).to_le_bytes()),
        DType::Bf16 => {
            let factor = bf16::from_f32(factor as f32);
            map_elements(elements, |x| (bf16::from_le_bytes(x) * factor).to_le_bytes());
        }
        DType::F16 => {
            let factor = f16::from_f32(factor as f32);
            map_elements(elements, |x| (f16::from_le_bytes(x) * factor).to_le_bytes());
        }
        DType::U8 | DType::U32 | DType::I64 => {
            panic!("only floats are averaged, which every call is checked for")
        }
    }
}

fn map_elements<const N: usize>(elements: &mut [u8], map: impl Fn([u8; N]) -> [u8; N]) {
    elements.as_chunks_mut().0.iter_mut().for_each(|element| *element = map(*element));
}

fn combine_elements<const N: usize>(sum: &mut [u8], other: &[u8], add: impl Fn([u8; N], [u8; N]) -> [u8; N]) {
    let (sum, other) = (sum.as_chunks_mut().0, other.as_chunks().0);
    sum.iter_mut().zip(other).for_each(|(a, &b)| *a = add(*a, b));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addition_wraps_or_rounds_per_dtype() {
        let check = |dtype, mut a: Vec<u8>, b: &[u8], expected: &[u8]| {
            add(dtype, &mut a, b);
            assert_eq!(a, expected, "{dtype}");
        };
        check(DType::F32, 1.5f32.to_le_bytes().into(), &2f32.to_le_bytes(), &3.5f32.to_le_bytes());
        check(DType::F64, 1e-9f64.to_le_bytes().into(), &1f64.to_le_bytes(), &(1.0 + 1e-9f64).to_le_bytes());
        let bf16 = |value| bf16::from_f32(value).to_le_bytes();
        check(DType::Bf16, bf16(256.0).into(), &bf16(1.0), &bf16(256.0));
        let f16 = |value| f16::from_f32(value).to_le_bytes();
        check(DType::F16, f16(2048.0).into(), &f16(1.0), &f16(2048.0));
        check(DType::F16, f16(40000.0).into(), &f16(40000.0), &f16(f32::INFINITY));
        check(DType::I64, i64::MAX.to_le_bytes().into(), &1i64.to_le_bytes(), &i64::MIN.to_le_bytes());
        check(DType::U32, u32::MAX.to_le_bytes().into(), &2u32.to_le_bytes(), &1u32.to_le_bytes());
    }

    #[test]
    fn scale_rounds_factor_and_product_to_dtype() {
        let check = |dtype, mut element: Vec<u8>, expected: &[u8]| {
            scale(dtype, 1.0 / 3.0, &mut element);
            assert_eq!(element, expected, "{dtype}");
        };
        check(DType::F32, 7f32.to_le_bytes().into(), &(7.0 * (1.0 / 3.0) as f32).to_le_bytes());
        check(DType::F64, 7f64.to_le_bytes().into(), &(7.0 * (1.0 / 3.0f64)).to_le_bytes());
        // A third is 0.333984375 in bf16: times 130 this is 43.418, while an exact third of 130 is nearest to 43.25.
        let bf16 = |value| bf16::from_f32(value).to_le_bytes();
        check(DType::Bf16, bf16(1.0).into(), &bf16(171.0 / 512.0));
        check(DType::Bf16, bf16(1.5).into(), &bf16(0.5));
        check(DType::Bf16, bf16(255.0).into(), &bf16(85.0));
        check(DType::Bf16, bf16(130.0).into(), &bf16(43.5));
        // A third is 0.333251953125 in f16: times 1532 this is 510.54, while an exact third of 1532 is nearest to
        // 510.75.
        let f16 = |value| f16::from_f32(value).to_le_bytes();
        check(DType::F16, f16(1532.0).into(), &f16(510.5));
    }
}
