//! The element types of kernels: loading, arithmetic and rounding.
//!
//! A kernel is generic over the [`Element`] type of its tensors and computes in its master type ([`Element::Acc`], a
//! [`Float`]); bf16 and f16 are widened on load and rounded to nearest even on store.

use std::fmt::Debug;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub};

use bytemuck::Pod;
use fsdp_core::DType;
use half::{bf16, f16};

use super::floats::{Floats, FloatsMut};
use super::math;
use crate::update::Number;

/// An element type of buffers.
pub(crate) trait Scalar: Pod + Send + Sync + Debug {
    /// The dtype of this type.
    const DTYPE: DType;
    /// The value that fills released storage in poison mode: NaN, or an implausible integer.
    const POISON: Self;
}

/// A float element type of tensors.
pub(crate) trait Element: Scalar {
    /// The type of arithmetic.
    type Acc: Float;

    /// Widens to the type of arithmetic.
    fn load(self) -> Self::Acc;

    /// Rounds to nearest even.
    fn store(value: Self::Acc) -> Self;

    /// Erases the element type of a slice.
    fn floats(slice: &[Self]) -> Floats<'_>;

    /// Erases the element type of a writable slice.
    fn floats_mut(slice: &mut [Self]) -> FloatsMut<'_>;

    /// Converts from double precision, rounding to nearest even.
    fn from_f64(value: f64) -> Self {
        Self::store(Self::Acc::of(value))
    }

    /// Converts to double precision, exactly.
    fn to_f64(self) -> f64 {
        self.load().as_f64()
    }
}

/// A float type that arithmetic is done in.
pub(crate) trait Float:
    Element<Acc = Self>
    + Number
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + MulAssign
    + PartialOrd
    + Sum
    + Default
{
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// A value below every finite number.
    const LOWEST: Self;
    /// Magnitudes as integers, ordered like the numbers; non-finite values are above all finite ones.
    type Magnitude: Ord + Copy + Default + Send + Sync;

    /// Returns the slice if it has this element type.
    fn from_floats<'a>(floats: Floats<'a>) -> Option<&'a [Self]>;

    /// Returns the writable slice if it has this element type.
    fn from_floats_mut<'a>(floats: &'a mut FloatsMut<'_>) -> Option<&'a mut [Self]>;

    /// Rounds a double precision number.
    fn of(value: f64) -> Self;

    /// Converts to double precision, exactly.
    fn as_f64(self) -> f64;

    /// The square root, correctly rounded.
    fn sqrt(self) -> Self;

    /// The exponential, within two units in the last place; vectorizes for `f32`.
    fn exp(self) -> Self;

    /// The magnitude.
    fn magnitude(self) -> Self::Magnitude;

    /// The logistic function.
    #[inline(always)]
    fn logistic(self) -> Self {
        Self::ONE / (Self::ONE + (-self).exp())
    }
}

impl Scalar for f32 {
    const DTYPE: DType = DType::F32;
    const POISON: Self = f32::NAN;
}

impl Scalar for f64 {
    const DTYPE: DType = DType::F64;
    const POISON: Self = f64::NAN;
}

impl Scalar for bf16 {
    const DTYPE: DType = DType::Bf16;
    const POISON: Self = bf16::NAN;
}

impl Scalar for f16 {
    const DTYPE: DType = DType::F16;
    const POISON: Self = f16::NAN;
}

impl Scalar for u8 {
    const DTYPE: DType = DType::U8;
    const POISON: Self = 0xde;
}

impl Scalar for u32 {
    const DTYPE: DType = DType::U32;
    const POISON: Self = 0xdead_beef;
}

impl Scalar for i64 {
    const DTYPE: DType = DType::I64;
    const POISON: Self = i64::MIN;
}

/// Implements the traits for a float type that arithmetic is done in.
macro_rules! float {
    ($float:ident, $variant:ident, $magnitude:ident, $exp:path) => {
        impl Element for $float {
            type Acc = Self;

            #[inline(always)]
            fn load(self) -> Self {
                self
            }

            #[inline(always)]
            fn store(value: Self) -> Self {
                value
            }

            fn floats(slice: &[Self]) -> Floats<'_> {
                Floats::$variant(slice)
            }

            fn floats_mut(slice: &mut [Self]) -> FloatsMut<'_> {
                FloatsMut::$variant(slice)
            }
        }

        impl Float for $float {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const LOWEST: Self = $float::NEG_INFINITY;
            type Magnitude = $magnitude;

            fn from_floats<'a>(floats: Floats<'a>) -> Option<&'a [Self]> {
                match floats {
                    Floats::$variant(slice) => Some(slice),
                    _ => None,
                }
            }

            fn from_floats_mut<'a>(floats: &'a mut FloatsMut<'_>) -> Option<&'a mut [Self]> {
                match floats {
                    FloatsMut::$variant(slice) => Some(slice),
                    _ => None,
                }
            }

            #[inline(always)]
            fn of(value: f64) -> Self {
                value as Self
            }

            #[inline(always)]
            fn as_f64(self) -> f64 {
                f64::from(self)
            }

            #[inline(always)]
            fn sqrt(self) -> Self {
                $float::sqrt(self)
            }

            #[inline(always)]
            fn exp(self) -> Self {
                $exp(self)
            }

            // Signed, because every vector instruction set can compare signed integers.
            #[inline(always)]
            fn magnitude(self) -> $magnitude {
                self.to_bits() as $magnitude & $magnitude::MAX
            }
        }
    };
}

float!(f32, F32, i32, math::exp);
float!(f64, F64, i64, f64::exp);

impl Element for bf16 {
    type Acc = f32;

    #[inline(always)]
    fn load(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    // As `bf16::from_f32`, but branchless, so that it vectorizes.
    #[inline(always)]
    fn store(value: f32) -> bf16 {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet_nan = (bits >> 16) | 0x40;
        bf16::from_bits(if value.is_nan() { quiet_nan } else { rounded } as u16)
    }

    #[inline(always)]
    fn from_f64(value: f64) -> bf16 {
        bf16::store(rounded_to_odd(value))
    }

    fn floats(slice: &[Self]) -> Floats<'_> {
        Floats::Bf16(slice)
    }

    fn floats_mut(slice: &mut [Self]) -> FloatsMut<'_> {
        FloatsMut::Bf16(slice)
    }
}

// Branchless, so that both vectorize, and without intrinsics, so that bits do not depend on the CPU.
impl Element for f16 {
    type Acc = f32;

    // Exponent and mantissa moved to their places in an `f32` give 2^-112 times the number, except for infinity and
    // NaN.
    #[inline(always)]
    fn load(self) -> f32 {
        let bits = u32::from(self.to_bits());
        let (sign, magnitude) = ((bits & 0x8000) << 16, (bits & 0x7fff) << 13);
        let finite = (f32::from_bits(magnitude) * f32::from_bits(0x7780_0000)).to_bits();
        let other = magnitude | 0x7f80_0000;
        f32::from_bits(sign | if magnitude >= 0x0f80_0000 { other } else { finite })
    }

    // As in M. Dukhan's FP16: adds a power of two chosen so that the `f32` sum has no more bits than the result, so
    // the addition rounds. Values that are too large become infinity in the first product.
    #[inline(always)]
    fn store(value: f32) -> f16 {
        let bits = value.to_bits();
        let (sign, doubled) = ((bits >> 16) & 0x8000, bits << 1);
        let base = (value.abs() * f32::from_bits(0x7780_0000)) * f32::from_bits(0x0880_0000);
        let power = (doubled & 0xff00_0000).max(0x7100_0000);
        let sum = (f32::from_bits((power >> 1) + 0x0780_0000) + base).to_bits();
        let rounded = ((sum >> 13) & 0x7c00) + (sum & 0x0fff);
        f16::from_bits((sign | if value.is_nan() { 0x7e00 } else { rounded }) as u16)
    }

    #[inline(always)]
    fn from_f64(value: f64) -> f16 {
        f16::store(rounded_to_odd(value))
    }

    fn floats(slice: &[Self]) -> Floats<'_> {
        Floats::F16(slice)
    }

    fn floats_mut(slice: &mut [Self]) -> FloatsMut<'_> {
        FloatsMut::F16(slice)
    }
}

/// Rounds to odd in single precision, so that a following rounding to fewer bits gives the same result as a single
/// rounding.
#[inline(always)]
fn rounded_to_odd(value: f64) -> f32 {
    let nearest = value as f32;
    let exact = f64::from(nearest);
    let toward_zero = nearest.to_bits() - u32::from(exact.abs() > value.abs());
    let inexact = u32::from(exact != value && !value.is_nan());
    f32::from_bits(toward_zero | inexact)
}

/// Runs `$body` with the type alias `$element` for the float dtype `$dtype`; other dtypes are an error.
macro_rules! for_float {
    ($dtype:expr, $element:ident => $body:expr) => {
        match $dtype {
            ::fsdp_core::DType::F32 => {
                type $element = f32;
                $body
            }
            ::fsdp_core::DType::F64 => {
                type $element = f64;
                $body
            }
            ::fsdp_core::DType::Bf16 => {
                type $element = ::half::bf16;
                $body
            }
            ::fsdp_core::DType::F16 => {
                type $element = ::half::f16;
                $body
            }
            other => $crate::lengths::not_a_float(other),
        }
    };
}
pub(crate) use for_float;

/// As `for_float`, for every dtype.
macro_rules! for_scalar {
    ($dtype:expr, $element:ident => $body:expr) => {
        match $dtype {
            ::fsdp_core::DType::U8 => {
                type $element = u8;
                $body
            }
            ::fsdp_core::DType::U32 => {
                type $element = u32;
                $body
            }
            ::fsdp_core::DType::I64 => {
                type $element = i64;
                $body
            }
            float => $crate::host::element::for_float!(float, $element => $body),
        }
    };
}
pub(crate) use for_scalar;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random;

    fn is_same(got: f16, expected: f16) -> bool {
        got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan()
    }

    #[test]
    fn f16_widening_matches_half_crate() {
        for bits in 0..=u16::MAX {
            let number = f16::from_bits(bits);
            let (got, expected) = (number.load(), number.to_f32());
            assert!(got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan(), "{bits:#x}");
            assert!(is_same(f16::store(got), number), "{bits:#x}");
        }
    }

    /// Tests all midpoints where the rounding direction changes, their neighbors, and other numbers.
    #[test]
    fn f16_rounding_matches_half_crate() {
        let check = |value: f32| {
            assert!(is_same(f16::store(value), f16::from_f32(value)), "{value:e}");
        };
        for bits in 0..0x7c00_u16 {
            let (number, next) = (f16::from_bits(bits).to_f32(), f16::from_bits(bits + 1).to_f32());
            let middle = if next.is_finite() { (number + next) / 2.0 } else { 65520.0 };
            for value in [number, middle, middle.next_up(), middle.next_down()] {
                [value, -value].into_iter().for_each(check);
            }
            // Doubles nearer to the midpoint than any single-precision number.
            for (value, up) in [(f64::from(middle).next_up(), 1), (f64::from(middle).next_down(), 0)] {
                assert_eq!(<f16 as Element>::from_f64(value).to_bits(), bits + up, "{value:e}");
            }
        }
        (0..100_000).for_each(|i| check(f32::from_bits(random::key(&[7, i]) as u32)));
        [f32::MAX, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e-45].into_iter().for_each(check);
    }
}
