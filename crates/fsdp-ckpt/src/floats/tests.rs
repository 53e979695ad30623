//! Widening is exact for every half-precision value; narrowing matches an exact search for the nearest value.

use proptest::prelude::*;

use super::*;

const HALVES: [TensorType; 2] = [TensorType::Bf16, TensorType::F16];

fn decode<T: Real + Default>(dtype: TensorType, bytes: &[u8]) -> Vec<T> {
    let mut out = vec![T::default(); bytes.len() / dtype.size_bytes()];
    T::decode(dtype, bytes, &mut out).unwrap();
    out
}

fn encode<T: Real>(dtype: TensorType, values: &[T]) -> Result<Vec<u8>, OutOfRange> {
    let mut out = vec![0; values.len() * dtype.size_bytes()];
    T::encode(dtype, values, &mut out).map(|()| out)
}

/// All half-precision values that are not NaN.
fn all_halves(dtype: TensorType) -> Vec<u16> {
    let is_nan = |bits: u16| match dtype {
        TensorType::Bf16 => bf16::from_bits(bits).is_nan(),
        _ => f16::from_bits(bits).is_nan(),
    };
    (0..=u16::MAX).filter(|&bits| !is_nan(bits)).collect()
}

/// The exact value of half-precision bits, computed from sign, exponent and mantissa.
fn exact(dtype: TensorType, bits: u16) -> f64 {
    let (mantissa_bits, bias) = if dtype == TensorType::Bf16 { (7, 127) } else { (10, 15) };
    let mantissa = f64::from(bits & ((1 << mantissa_bits) - 1));
    let exponent = i32::from((bits & 0x7fff) >> mantissa_bits);
    let one = f64::from(1_u32 << mantissa_bits);
    let largest = if dtype == TensorType::Bf16 { 255 } else { 31 };
    let magnitude = match exponent {
        0 => mantissa / one * 2_f64.powi(1 - bias),
        e if e == largest => f64::INFINITY,
        e => (1.0 + mantissa / one) * 2_f64.powi(e - bias),
    };
    if bits >> 15 == 1 { -magnitude } else { magnitude }
}

#[test]
fn every_half_widens_exactly_and_round_trips() {
    for dtype in HALVES {
        let halves = all_halves(dtype);
        let bytes: Vec<u8> = halves.iter().flat_map(|bits| bits.to_le_bytes()).collect();
        let (single, double) = (decode::<f32>(dtype, &bytes), decode::<f64>(dtype, &bytes));
        for ((&bits, &single), &double) in halves.iter().zip(&single).zip(&double) {
            assert_eq!(double.to_bits(), exact(dtype, bits).to_bits(), "{dtype} {bits:#x}");
            assert_eq!(f64::from(single).to_bits(), double.to_bits());
        }
        assert_eq!(encode(dtype, &single).unwrap(), bytes);
        assert_eq!(encode(dtype, &double).unwrap(), bytes);
    }
}

#[test]
fn nan_stays_nan() {
    for dtype in [TensorType::Bf16, TensorType::F16, TensorType::F32, TensorType::F64] {
        let bytes = encode(dtype, &[f32::NAN]).unwrap();
        assert!(decode::<f32>(dtype, &bytes)[0].is_nan());
        let bytes = encode(dtype, &[f64::NAN]).unwrap();
        assert!(decode::<f64>(dtype, &bytes)[0].is_nan());
    }
}

#[test]
fn infinities_encode_but_out_of_range_values_are_rejected() {
    for (dtype, largest_kept, first_refused) in [
        (TensorType::F16, 65519.99, 65520.0),
        (TensorType::Bf16, 3.3961e38, 3.3962e38),
        (TensorType::F32, 3.40282356e38, 3.40282357e38),
    ] {
        assert!(encode(dtype, &[f64::INFINITY, f64::NEG_INFINITY]).is_ok());
        let kept = encode(dtype, &[largest_kept, -largest_kept]).unwrap();
        assert!(decode::<f64>(dtype, &kept).iter().all(|v| v.is_finite()));
        let refused = encode(dtype, &[0.0, -first_refused]).unwrap_err();
        assert_eq!(refused, OutOfRange { index: 1, value: -first_refused, target: dtype });
    }
    let mut out = [0.0_f32];
    let refused = f32::decode(TensorType::F64, &1e300_f64.to_le_bytes(), &mut out).unwrap_err();
    assert_eq!(refused.target, TensorType::F32);
}

/// The nearest half-precision value by binary search over the exact values; ties go to the even bits.
fn nearest_half(dtype: TensorType, value: f64) -> u16 {
    let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
    let value = value.abs();
    let infinity = if dtype == TensorType::Bf16 { 0x7f80_u16 } else { 0x7c00 };
    let magnitudes: Vec<u16> = (0..infinity).collect();
    let above = magnitudes.partition_point(|&bits| exact(dtype, bits) <= value) as u16;
    let below = above - 1;
    if above == infinity {
        return sign | below;
    }
    let (down, up) = (value - exact(dtype, below), exact(dtype, above) - value);
    let is_below = down < up || (down == up && below.is_multiple_of(2));
    sign | if is_below { below } else { above }
}

proptest! {
    #[test]
    fn narrowing_rounds_to_nearest_half(
        bits in any::<u64>(),
        scale in -45_i32..45,
        tie in prop::sample::select(vec![None, Some(52 - 7 - 1), Some(52 - 10 - 1)]),
        beside in -1_i64..=1,
    ) {
        // Values of ordinary magnitude. Most are a tie of bf16 or f16, or the f64 next to one.
        let mut bits = (bits & !(0x7ff << 52)) | (1023 << 52);
        if let Some(tie) = tie {
            bits = (bits & (u64::MAX << tie) | (1 << tie)).wrapping_add_signed(beside);
        }
        let value = f64::from_bits(bits) * 2_f64.powi(scale);
        for dtype in HALVES {
            if let Ok(bytes) = encode(dtype, &[value]) {
                prop_assert_eq!(u16::from_le_bytes([bytes[0], bytes[1]]), nearest_half(dtype, value));
            }
            if let Ok(bytes) = encode(dtype, &[value as f32]) {
                let expected = nearest_half(dtype, f64::from(value as f32));
                prop_assert_eq!(u16::from_le_bytes([bytes[0], bytes[1]]), expected);
            }
        }
    }

    #[test]
    fn f32_and_f64_keep_their_bits(single in any::<u32>(), double in any::<u64>()) {
        let bytes = encode(TensorType::F32, &[f32::from_bits(single)]).unwrap();
        prop_assert_eq!(decode::<f32>(TensorType::F32, &bytes)[0].to_bits(), single);
        let bytes = encode(TensorType::F64, &[f64::from_bits(double)]).unwrap();
        prop_assert_eq!(decode::<f64>(TensorType::F64, &bytes)[0].to_bits(), double);
    }
}

#[test]
fn conversion_between_dtypes_rounds_once() {
    let floats = [TensorType::F64, TensorType::F32, TensorType::Bf16, TensorType::F16];
    // More than one step. The values are not exact in any narrower type.
    let values: Vec<f64> = (0..1500).map(|index| (f64::from(index) - 700.0) * 1.000_123_456_789).collect();
    for from in floats {
        let bytes = encode(from, &values).unwrap();
        let exact: Vec<f64> = decode(from, &bytes);
        for to in floats {
            let mut out = vec![0; values.len() * to.size_bytes()];
            between(from, to, &bytes, &mut out).unwrap();
            assert_eq!(out, encode(to, &exact).unwrap(), "{from} to {to}");
        }
    }
}

#[test]
fn out_of_range_error_names_element() {
    let mut values = vec![1_f64; 1200];
    values[1100] = 1e6;
    let bytes = encode(TensorType::F32, &values).unwrap();
    let found = between(TensorType::F32, TensorType::F16, &bytes, &mut vec![0; 2400]).unwrap_err();
    assert_eq!((found.index, found.value, found.target), (1100, 1e6, TensorType::F16));
}
