//! Scalar mathematics and reductions that vectorize identically everywhere.
//!
//! Sums run over [`LANES`] interleaved partial sums that are added pairwise at the end, so the order of additions
//! depends only on the length, not on the width of the CPU's vectors. The compiler never fuses a product and a sum on
//! its own; [`exp`] requests it explicitly, in the body of a loop and in its tail alike. (On a CPU without that
//! instruction, the same result is computed slowly.)

use super::element::Float;

/// Number of interleaved partial sums of a reduction.
const LANES: usize = 32;

/// `e^x` within two units in the last place (including denormal results), branchless.
///
/// Cody-Waite reduction `x = n ln 2 + r` with `|r| <= ln 2 / 2`, Cephes' polynomial for `e^r`, and `2^n` in two
/// factors, so that neither overflows if the result does not.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Adding this moves the integer part to the low bits of the mantissa.
    const SHIFT: f32 = 12_582_912.0;
    // Beyond these limits the result is 0 or infinite. The comparisons keep NaN.
    let x = if x < -150.0 { -150.0 } else { x };
    let x = if x > 120.0 { 120.0 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, SHIFT);
    let n = shifted - SHIFT;
    let r = n.mul_add(2.121_944_4e-4, n.mul_add(-0.693_359_4, x));
    let mut p = 1.987_569_1e-4_f32;
    p = p.mul_add(r, 1.398_199_9e-3);
    p = p.mul_add(r, 8.333_452e-3);
    p = p.mul_add(r, 4.166_579_6e-2);
    p = p.mul_add(r, 1.666_666_5e-1);
    p = p.mul_add(r, 5.000_000_3e-1);
    let power = p.mul_add(r * r, r) + 1.0;
    let exponent = (shifted.to_bits() as i32).wrapping_sub(SHIFT.to_bits() as i32);
    let low = exponent >> 1;
    power * pow2(low) * pow2(exponent.wrapping_sub(low))
}

/// `2^exponent` for the exponents of normal numbers.
#[inline(always)]
fn pow2(exponent: i32) -> f32 {
    f32::from_bits((exponent.wrapping_add(127) as u32) << 23)
}

/// The hyperbolic tangent, within a few units in the last place, branchless: near 0 by a quotient of polynomials
/// (Lambert's continued fraction), elsewhere by an exponential, whose difference from 1 is then accurate.
#[inline(always)]
pub(crate) fn tanh<A: Float>(x: A) -> A {
    let a = if x < A::ZERO { -x } else { x };
    let square = x * x;
    let of = |[c0, c1, c2, c3]: [f64; 4]| {
        A::of(c0) + square * (A::of(c1) + square * (A::of(c2) + square * A::of(c3)))
    };
    let near = x * of([135_135.0, 17_325.0, 378.0, 1.0]) / of([135_135.0, 62_370.0, 3_150.0, 28.0]);
    let power = (-(a + a)).exp();
    let far = (A::ONE - power) / (A::ONE + power);
    let far = if x < A::ZERO { -far } else { far };
    if a < A::of(0.45) { near } else { far }
}

/// Returns the sum of `term` over the elements of a slice, in lanes.
#[inline(always)]
pub(crate) fn sum1<A: Float, X: Copy>(x: &[X], term: impl Fn(X) -> A) -> A {
    sum3(x, x, x, |x, _, _| term(x))
}

/// Returns the sum of `term` over the elements of two slices of equal length, in lanes.
#[inline(always)]
pub(crate) fn sum2<A: Float, X: Copy, Y: Copy>(x: &[X], y: &[Y], term: impl Fn(X, Y) -> A) -> A {
    sum3(x, y, y, |x, y, _| term(x, y))
}

/// Returns the sum of `term` over the elements of three slices of equal length, in lanes.
#[inline(always)]
pub(crate) fn sum3<A: Float, X: Copy, Y: Copy, Z: Copy>(
    x: &[X],
    y: &[Y],
    z: &[Z],
    term: impl Fn(X, Y, Z) -> A,
) -> A {
    let mut lanes = [A::ZERO; LANES];
    let (x, x_tail) = x.as_chunks::<LANES>();
    let (y, y_tail) = y.as_chunks::<LANES>();
    let (z, z_tail) = z.as_chunks::<LANES>();
    for ((x, y), z) in x.iter().zip(y).zip(z) {
        for (((partial, &x), &y), &z) in lanes.iter_mut().zip(x).zip(y).zip(z) {
            *partial += term(x, y, z);
        }
    }
    for (((partial, &x), &y), &z) in lanes.iter_mut().zip(x_tail).zip(y_tail).zip(z_tail) {
        *partial += term(x, y, z);
    }
    fold(lanes, |a, b| a + b)
}

/// Returns the largest element; NaN elements may be ignored.
#[inline(always)]
pub(crate) fn max<A: Float>(values: &[A]) -> A {
    let larger = |a: A, b: A| if b > a { b } else { a };
    let mut lanes = [A::LOWEST; LANES];
    let mut chunks = values.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (partial, &value) in lanes.iter_mut().zip(chunk) {
            *partial = larger(*partial, value);
        }
    }
    for (partial, &value) in lanes.iter_mut().zip(chunks.remainder()) {
        *partial = larger(*partial, value);
    }
    fold(lanes, larger)
}

/// Returns the sum, in lanes.
#[inline(always)]
pub(crate) fn sum<A: Float>(values: &[A]) -> A {
    let mut lanes = [A::ZERO; LANES];
    let mut chunks = values.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (partial, &value) in lanes.iter_mut().zip(chunk) {
            *partial += value;
        }
    }
    for (partial, &value) in lanes.iter_mut().zip(chunks.remainder()) {
        *partial += value;
    }
    fold(lanes, |a, b| a + b)
}

/// Replaces `values` by `e^(scale * value - shift)` and returns their sum.
#[inline(always)]
pub(crate) fn exp_sum<A: Float>(values: &mut [A], scale: A, shift: A) -> A {
    let mut lanes = [A::ZERO; LANES];
    let mut chunks = values.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for (partial, value) in lanes.iter_mut().zip(chunk) {
            *value = (*value * scale - shift).exp();
            *partial += *value;
        }
    }
    for (partial, value) in lanes.iter_mut().zip(chunks.into_remainder()) {
        *value = (*value * scale - shift).exp();
        *partial += *value;
    }
    fold(lanes, |a, b| a + b)
}

/// Combines lanes pairwise, upper half into lower half.
#[inline(always)]
fn fold<A: Copy>(mut lanes: [A; LANES], combine: impl Fn(A, A) -> A) -> A {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] = combine(lanes[lane], lanes[lane + width]);
        }
        width /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulps() {
        let mut x = -104.5_f32;
        while x < 88.7 {
            let exact = f64::from(x).exp();
            let unit = f64::from((exact as f32).next_up()) - f64::from(exact as f32);
            let error = (f64::from(exp(x)) - exact).abs() / unit;
            assert!(error <= 2.0, "exp({x}) = {} is {error} units from {exact}", exp(x));
            x += 0.000_37;
        }
    }

    #[test]
    fn tanh_is_within_six_ulps() {
        let mut x = -20.0_f64;
        while x < 20.0 {
            let exact = x.tanh();
            assert!((tanh(x) - exact).abs() <= 6.0 * f64::EPSILON * exact.abs(), "tanh({x}) = {}", tanh(x));
            let single = x as f32;
            let (exact, got) = (f64::from(single).tanh(), f64::from(tanh(single)));
            assert!(
                (got - exact).abs() <= 6.0 * f64::from(f32::EPSILON) * exact.abs(),
                "tanh({single}) = {got}"
            );
            x += 0.003_7;
        }
        assert_eq!([0.0_f32, 100.0, -1e4].map(tanh), [0.0, 1.0, -1.0]);
        assert!(tanh(f32::NAN).is_nan());
    }

    #[test]
    fn exp_handles_special_values() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(89.0), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }
}
