//! Exact sums of `f64` values, independent of the order of addition.
//!
//! An [`ExactSum`] is a fixed-point number wide enough for every finite `f64` (Kulisch's accumulator): 32-bit digits in
//! `i64` words, so that about 2^31 additions fit before carries must be resolved. Sums of disjoint parts may be added
//! as integers in any order and give the same digits, hence the same rounded result. This makes the gradient norm and
//! the loss independent of the number of ranks. Non-finite values are counted instead of summed.

/// Bits below the least significant digit: the exponent of the smallest subnormal.
const LOWEST_EXPONENT: i32 = -1074;
/// Number of 32-bit digits: 2098 bits of `f64` range and some head room for carries.
const DIGITS: usize = 68;
/// Number of additions after which carries are resolved; each adds less than 2^32 to a digit.
const ADDITIONS_MAX: u32 = 1 << 30;

/// The exact sum of many `f64`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExactSum {
    digits: [i64; DIGITS],
    non_finite: i64,
    pending: u32,
}

impl Default for ExactSum {
    fn default() -> Self {
        Self { digits: [0; DIGITS], non_finite: 0, pending: 0 }
    }
}

impl ExactSum {
    /// Number of words of [`ExactSum::to_words`].
    pub const WORDS: usize = DIGITS + 1;

    /// Adds one value.
    pub fn add(&mut self, value: f64) {
        if !value.is_finite() {
            self.non_finite += 1;
            return;
        }
        let bits = value.to_bits();
        let exponent = ((bits >> 52) & 0x7ff) as usize;
        let fraction = bits & ((1 << 52) - 1);
        // A subnormal has no hidden bit and shares the exponent of the smallest normal number.
        let (mantissa, shift) =
            if exponent == 0 { (fraction, 0) } else { (fraction | 1 << 52, exponent - 1) };
        let wide = u128::from(mantissa) << (shift % 32);
        let sign = if value.is_sign_negative() { -1 } else { 1 };
        for (place, digit) in self.digits[shift / 32..shift / 32 + 3].iter_mut().enumerate() {
            *digit += sign * i64::from((wide >> (32 * place)) as u32);
        }
        self.pending += 1;
        if self.pending == ADDITIONS_MAX {
            self.carry();
        }
    }

    /// Adds another sum.
    pub fn merge(&mut self, other: &ExactSum) {
        let mut other = other.clone();
        other.carry();
        self.carry();
        for (digit, other_digit) in self.digits.iter_mut().zip(&other.digits) {
            *digit += other_digit;
        }
        self.non_finite += other.non_finite;
        self.carry();
    }

    /// The sum as words that may be added element by element (up to 2^30 sums) and passed to
    /// [`ExactSum::from_words`]; the last word counts non-finite values.
    pub fn to_words(&self) -> [i64; Self::WORDS] {
        let mut carried = self.clone();
        carried.carry();
        let mut words = [0; Self::WORDS];
        words[..DIGITS].copy_from_slice(&carried.digits);
        words[DIGITS] = self.non_finite;
        words
    }

    /// Reconstructs a sum from its words, or from the element-wise sum of several.
    ///
    /// # Panics
    /// When the number of words is not [`ExactSum::WORDS`].
    pub fn from_words(words: &[i64]) -> Self {
        assert_eq!(words.len(), Self::WORDS, "an exact sum has a fixed number of words");
        let mut sum = Self { non_finite: words[DIGITS], ..Self::default() };
        sum.digits.copy_from_slice(&words[..DIGITS]);
        sum.carry();
        sum
    }

    /// Number of added values that were infinite or NaN.
    pub fn non_finite(&self) -> i64 {
        self.non_finite
    }

    /// The sum rounded to `f64` (within one unit in the last place; equal sums give equal bits); NaN if a non-finite
    /// value was added.
    pub fn value(&self) -> f64 {
        if self.non_finite > 0 {
            return f64::NAN;
        }
        let mut carried = self.clone();
        carried.carry();
        if carried.digits[DIGITS - 1] < 0 {
            for digit in &mut carried.digits {
                *digit = -*digit;
            }
            carried.carry();
            return -carried.round();
        }
        carried.round()
    }

    /// Rounds a carried, non-negative sum, from the leading digits that can affect the 53 bits of the result.
    fn round(&self) -> f64 {
        let Some(top) = self.digits.iter().rposition(|&digit| digit != 0) else { return 0.0 };
        let low = top.saturating_sub(2);
        let mut mantissa = 0u128;
        for &digit in self.digits[low..=top].iter().rev() {
            mantissa = mantissa << 32 | digit as u128;
        }
        let exponent = LOWEST_EXPONENT + 32 * low as i32;
        // Two factors, so that neither underflows unless the product does.
        let half = exponent / 2;
        mantissa as f64 * pow2(half) * pow2(exponent - half)
    }

    /// Resolves carries: every digit but the highest becomes 0 ..= 2^32 - 1.
    fn carry(&mut self) {
        let mut carry = 0;
        for digit in &mut self.digits[..DIGITS - 1] {
            let total = *digit + carry;
            *digit = total & 0xffff_ffff;
            carry = total >> 32;
        }
        self.digits[DIGITS - 1] += carry;
        self.pending = 0;
    }
}

/// `2^exponent` for exponents whose power is a normal number.
fn pow2(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn exact(values: &[f64]) -> ExactSum {
        let mut sum = ExactSum::default();
        values.iter().for_each(|&value| sum.add(value));
        sum
    }

    #[test]
    fn single_values_round_trip() {
        for value in [0.0, 1.0, -1.5, f64::MAX, -f64::MAX, f64::MIN_POSITIVE, 5e-324, -3e-310, 1e300, 1e-300]
        {
            assert_eq!(exact(&[value]).value(), value);
        }
    }

    #[test]
    fn cancellation_is_exact() {
        assert_eq!(exact(&[1e300, 1.0, -1e300]).value(), 1.0);
        assert_eq!(exact(&[1e16, 1.0, -1e16, 1e-300]).value(), 1.0);
    }

    #[test]
    fn non_finite_values_are_counted() {
        let sum = exact(&[1.0, f64::INFINITY, f64::NAN]);
        assert_eq!(sum.non_finite(), 2);
        assert!(sum.value().is_nan());
    }

    proptest! {
        #[test]
        fn order_and_grouping_do_not_matter(
            values in prop::collection::vec(prop::num::f64::NORMAL | prop::num::f64::SUBNORMAL, 1..40),
            cut in 0usize..40,
        ) {
            let cut = cut.min(values.len());
            let sum = exact(&values);
            let mut reversed = values.clone();
            reversed.reverse();
            prop_assert_eq!(sum.to_words(), exact(&reversed).to_words());
            let mut merged = exact(&values[cut..]);
            merged.merge(&exact(&values[..cut]));
            prop_assert_eq!(sum.to_words(), merged.to_words());
            let words: Vec<i64> =
                exact(&values[cut..]).to_words().iter().zip(exact(&values[..cut]).to_words()).map(|(a, b)| a + b).collect();
            prop_assert_eq!(sum.value().to_bits(), ExactSum::from_words(&words).value().to_bits());
        }

        #[test]
        fn sums_of_small_binary_fractions_are_exact(values in prop::collection::vec(-1_000_000i64..1_000_000, 0..60)) {
            let floats: Vec<f64> = values.iter().map(|&v| v as f64 / 1024.0).collect();
            prop_assert_eq!(exact(&floats).value(), values.iter().sum::<i64>() as f64 / 1024.0);
        }
    }
}
