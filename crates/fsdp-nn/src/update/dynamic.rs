//! The dynamic 8-bit data type of bitsandbytes (Dettmers et al. 2021, 8-bit Optimizers via Block-wise Quantization): what
//! numbers up to 1 a byte stands for.

use std::sync::LazyLock;

/// Powers of ten that it spans: the smaller the power, the fewer numbers there are of it.
const DECADES: i32 = 7;

/// The numbers of 256 codes.
#[derive(Debug)]
pub struct CodeBook {
    /// What each code stands for, in ascending order.
    pub values: [f32; 256],
    /// Where the next code begins: the least number that is not nearer to the code's own.
    pub bounds: [f32; 255],
}

impl CodeBook {
    /// Numbers of both signs.
    pub fn signed() -> &'static Self {
        static BOOK: LazyLock<CodeBook> = LazyLock::new(|| CodeBook::new(true));
        &BOOK
    }

    /// Zero and positive numbers.
    pub fn unsigned() -> &'static Self {
        static BOOK: LazyLock<CodeBook> = LazyLock::new(|| CodeBook::new(false));
        &BOOK
    }

    /// `create_dynamic_map` of bitsandbytes: in each decade the centres of equal parts of 0.1 to 1, twice as many as in the
    /// one below; zero; and one. The arithmetic is that of `torch.linspace` on a processor, so the bits are too.
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
        let bounds: Vec<f32> = values.windows(2).map(|pair| middle(pair[0], pair[1])).collect();
        let count = "a byte has 256 values";
        Self { values: values.try_into().expect(count), bounds: bounds.try_into().expect(count) }
    }

    /// The code of the nearest number, of the larger one of two that are as near; 0 for what is not a number.
    #[inline(always)]
    pub(super) fn code(&self, number: f32) -> u8 {
        let mut code = 0;
        for step in [128, 64, 32, 16, 8, 4, 2, 1] {
            code += if number >= self.bounds[code + step - 1] { step } else { 0 };
        }
        #[expect(clippy::cast_possible_truncation, reason = "the steps add up to 255")]
        return code as u8;
    }
}

/// The least number of single precision that is not below the middle of two.
fn middle(below: f32, above: f32) -> f32 {
    let middle = f64::midpoint(f64::from(below), f64::from(above));
    let nearest = middle as f32;
    if f64::from(nearest) < middle { nearest.next_up() } else { nearest }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every code is that of a look at all distances, around every bound and every value.
    #[test]
    fn the_code_is_that_of_the_nearest_value() {
        for book in [CodeBook::signed(), CodeBook::unsigned()] {
            let ends = [-2.0, -1.0, -0.0, 1e-45, 1.0, 2.0];
            let numbers = book.bounds.into_iter().chain(book.values).chain(ends);
            for number in numbers.flat_map(|number| [number.next_down(), number, number.next_up()]) {
                let away = |code: &usize| (f64::from(book.values[*code]) - f64::from(number)).abs();
                let nearest = (0..256).rev().min_by(|a, b| away(a).total_cmp(&away(b))).unwrap();
                assert_eq!(usize::from(book.code(number)), nearest, "{number}");
            }
            assert_eq!(book.code(f32::NAN), 0);
        }
    }
}
