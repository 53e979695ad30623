//! The dynamic 8-bit data type of bitsandbytes (Dettmers et al. 2021, 8-bit Optimizers via Block-wise Quantization),
//! which encodes numbers of magnitude up to 1 in a byte.

use std::sync::LazyLock;

/// Number of decades covered; smaller decades have fewer codes.
const DECADES: i32 = 7;

/// The upper 16 bits of 2^-23. Smaller numbers are nearer to zero than to any other value.
const MIN_HALF: u32 = (127 - 23) << 7;

/// Number of upper halves from [`MIN_HALF`] up to the one of 1.
const HALVES: u32 = (23 << 7) + 1;

/// The values of the 256 codes.
#[derive(Debug)]
pub struct CodeBook {
    /// The value of each code, in ascending order.
    pub values: [f32; 256],
    /// The lower bound of the next code: the smallest number that is not nearer to this code's value. Infinite for
    /// the last code.
    pub bounds: [f32; 256],
    /// For each pattern of upper 16 bits, the code of the smallest number with that pattern: positive numbers first,
    /// negative ones from [`NEGATIVE`] on. Numbers with the same pattern use at most one other code. (The length is a
    /// power of two, so that no index needs a bounds check.)
    codes: [u32; 2 * NEGATIVE],
}

/// Index of the first upper half of negative numbers.
const NEGATIVE: usize = 4096;

impl CodeBook {
    /// The code book for numbers of both signs.
    pub fn signed() -> &'static Self {
        static BOOK: LazyLock<CodeBook> = LazyLock::new(|| CodeBook::new(true));
        &BOOK
    }

    /// The code book for zero and positive numbers.
    pub fn unsigned() -> &'static Self {
        static BOOK: LazyLock<CodeBook> = LazyLock::new(|| CodeBook::new(false));
        &BOOK
    }

    /// `create_dynamic_map` of bitsandbytes: in each decade, the centers of equal parts of 0.1 to 1, twice as many as
    /// in the decade below; plus zero and one. The arithmetic is that of `torch.linspace` on a CPU, so the bits are
    /// identical.
    fn new(is_signed: bool) -> Self {
        let mut values = vec![0.0, 1.0];
        for decade in 0..DECADES {
            let parts = 1 << if is_signed { decade } else { decade + 1 };
            let (first, last) = (0.1f32, 1.0f32);
            let step = (last - first) / parts as f32;
            let edge = |at: i32| {
                let near_last = step.mul_add(-((parts - at) as f32), last);
                if at < (parts + 1) / 2 { step.mul_add(at as f32, first) } else { near_last }
            };
            let power = 10f64.powi(decade + 1 - DECADES) as f32;
            for part in 0..parts {
                let value = power * ((edge(part) + edge(part + 1)) / 2.0);
                values.push(value);
                if is_signed {
                    values.push(-value);
                }
            }
        }
        values.sort_by(f32::total_cmp);
        let bounds = values.windows(2).map(|pair| middle(pair[0], pair[1])).chain([f32::INFINITY]);
        let bounds: Vec<f32> = bounds.collect();
        let code = |number: f32| bounds.partition_point(|bound| *bound <= number) as u32;
        let codes = std::array::from_fn(|half| code(smallest_number(half >= NEGATIVE, half % NEGATIVE)));
        let count = "a byte has 256 values";
        Self { values: values.try_into().expect(count), codes, bounds: bounds.try_into().expect(count) }
    }

    /// Returns the code of the nearest value; ties go to the larger value. For NaN, returns an unspecified code.
    #[inline(always)]
    pub(crate) fn code(&self, number: f32) -> u8 {
        let bits = number.to_bits();
        let half = ((bits >> 16) & 0x7fff).saturating_sub(MIN_HALF).min(HALVES - 1) as usize;
        let code = self.codes[(half + (bits >> 31) as usize * NEGATIVE) % (2 * NEGATIVE)];
        let code = code + u32::from(number >= self.bounds[code as usize % 256]);
        #[expect(clippy::cast_possible_truncation, reason = "bounds of the last code are infinite")]
        return code as u8;
    }
}

/// Returns the smallest number with this sign and upper half; `half` counts from [`MIN_HALF`].
fn smallest_number(is_negative: bool, half: usize) -> f32 {
    let upper = (half as u32).min(HALVES - 1) + MIN_HALF;
    match (is_negative, half) {
        (false, 0) => 0.0,
        (false, _) => f32::from_bits(upper << 16),
        (true, _) if upper == MIN_HALF + HALVES - 1 => f32::NEG_INFINITY,
        (true, _) => -f32::from_bits(upper << 16 | 0xffff),
    }
}

/// Returns the smallest `f32` that is at least the midpoint of two numbers.
fn middle(below: f32, above: f32) -> f32 {
    let middle = f64::midpoint(f64::from(below), f64::from(above));
    let nearest = middle as f32;
    if f64::from(nearest) < middle { nearest.next_up() } else { nearest }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with an exhaustive search, around every bound, every value, and every upper half.
    #[test]
    fn code_is_of_nearest_value() {
        for book in [CodeBook::signed(), CodeBook::unsigned()] {
            let ends = [-2.0, -1.0, -0.0, 1e-45, 1.0, 2.0];
            let halves = (0..NEGATIVE).flat_map(|half| [false, true].map(|sign| smallest_number(sign, half)));
            let halves = halves.filter(|number| number.is_finite());
            let bounds = book.bounds.into_iter().filter(|bound| bound.is_finite());
            let numbers = bounds.chain(book.values).chain(halves).chain(ends);
            for number in numbers.flat_map(|number| [number.next_down(), number, number.next_up()]) {
                let away = |code: &usize| (f64::from(book.values[*code]) - f64::from(number)).abs();
                let nearest = (0..256).rev().min_by(|a, b| away(a).total_cmp(&away(b))).unwrap();
                assert_eq!(usize::from(book.code(number)), nearest, "{number}");
            }
        }
    }
}
