//! What the values of a tensor look like: whether they are numbers, and how they are distributed.

use super::StateRows;
use crate::{error::Error, floats::CHUNK_ELEMENTS};

/// Statistics of the elements of a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Statistics {
    /// Number of elements.
    pub elements: u64,
    /// Number of elements that are infinite or not a number.
    pub not_finite: u64,
    /// The index of the first of these.
    pub first_not_finite: Option<u64>,
    /// Number of elements that are zero.
    pub zeros: u64,
    /// The means of the first, second and fourth powers of finite elements.
    pub moments: [f64; 3],
}

impl Statistics {
    /// Whether every element is zero.
    pub fn is_zero(&self) -> bool {
        self.zeros == self.elements
    }

    /// Adds the next elements; the moments are sums until all are added.
    fn add(&mut self, values: &[f64]) {
        for (index, &value) in (self.elements..).zip(values) {
            if !value.is_finite() {
                self.not_finite += 1;
                self.first_not_finite.get_or_insert(index);
                continue;
            }
            self.zeros += u64::from(value == 0.0);
            let square = value * value;
            for (sum, power) in self.moments.iter_mut().zip([value, square, square * square]) {
                *sum += power;
            }
        }
        self.elements += values.len() as u64;
    }
}

impl StateRows<'_> {
    /// Reads a whole tensor of floats.
    ///
    /// # Errors
    /// Those of [`read_rows_f64`](StateRows::read_rows_f64).
    pub fn statistics(&mut self, name: &str, shape: &[usize]) -> Result<Statistics, Error> {
        let rows = shape.first().copied().unwrap_or(1);
        let row_len: usize = shape.iter().skip(1).product();
        let step = (CHUNK_ELEMENTS / row_len.max(1)).max(1);
        let (mut found, mut values) = (Statistics::default(), Vec::new());
        for first in (0..rows).step_by(step) {
            let end = rows.min(first + step);
            values.resize((end - first) * row_len, 0.0);
            self.read_rows_f64(name, first..end, &mut values)?;
            found.add(&values);
        }
        let finite = (found.elements - found.not_finite).max(1) as f64;
        found.moments = found.moments.map(|sum| sum / finite);
        Ok(found)
    }
}
