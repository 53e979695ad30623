//! Initial values of parameters, from counter-based generators keyed by (seed, name).
//!
//! Every element is a function of the seed, the parameter's name and its index. A rank therefore computes its shard
//! without the rest, and a model has the same initial values at every world size.

use rayon::prelude::*;

use crate::random;

/// Elements that one core writes at a time; takes a few milliseconds.
const PART_ELEMS: usize = 1 << 16;

/// The distribution of a parameter's initial values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All zero.
    Zeros,
    /// All one.
    Ones,
    /// Normal with mean 0.
    Normal {
        /// The standard deviation.
        std: f64,
    },
    /// Normal with mean 0 in all rows but one.
    Table {
        /// The standard deviation.
        std: f64,
        /// Elements per row.
        width: usize,
        /// The row that is zero.
        zero_row: usize,
    },
    /// Uniform in `-bound .. bound`.
    Uniform {
        /// The bound.
        bound: f64,
    },
    /// The logarithm of what is uniform in `low .. high`.
    LogUniform {
        /// The lower bound, above 0.
        low: f64,
        /// The upper bound.
        high: f64,
    },
}

impl Init {
    /// Returns the values of the elements `offset ..` of the parameter `fqn`, as an endless iterator.
    pub fn values(self, seed: u64, fqn: &str, offset: usize) -> impl Iterator<Item = f64> {
        let key = random::key(&[seed, random::name_part(fqn)]);
        (offset as u64..).map(move |element| match self {
            Init::Zeros => 0.0,
            Init::Ones => 1.0,
            Init::Table { width, zero_row, .. } if element / width as u64 == zero_row as u64 => 0.0,
            Init::Normal { std } | Init::Table { std, .. } => std * random::normal(key, element),
            Init::Uniform { bound } => bound * (2.0 * random::uniform(key, element) - 1.0),
            Init::LogUniform { low, high } => (low + (high - low) * random::uniform(key, element)).ln(),
        })
    }

    /// Writes [`Init::values`] as `f32`.
    pub fn fill_f32(self, seed: u64, fqn: &str, offset: usize, elements: &mut [f32]) {
        self.fill(seed, fqn, offset, elements, |value| value as f32);
    }

    /// Writes [`Init::values`] as `f64`.
    pub fn fill_f64(self, seed: u64, fqn: &str, offset: usize, elements: &mut [f64]) {
        self.fill(seed, fqn, offset, elements, |value| value);
    }

    /// Writes long ranges on all cores: each element takes a logarithm and a cosine, and large models have billions
    /// of them.
    fn fill<E: Send>(
        self,
        seed: u64,
        fqn: &str,
        offset: usize,
        elements: &mut [E],
        convert: impl Fn(f64) -> E + Sync,
    ) {
        let write = |(part, elements): (usize, &mut [E])| {
            let values = self.values(seed, fqn, offset + part * PART_ELEMS);
            elements.iter_mut().zip(values).for_each(|(element, value)| *element = convert(value));
        };
        if elements.len() <= PART_ELEMS {
            write((0, elements));
        } else {
            elements.par_chunks_mut(PART_ELEMS).enumerate().for_each(write);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filled_ranges_match_complete_fill() {
        let init = Init::Normal { std: 0.5 };
        let mut all = [0.0; 50];
        init.fill_f64(3, "a.weight", 0, &mut all);
        for (offset, len) in [(0, 50), (7, 13), (49, 1), (50, 0)] {
            let mut part = vec![0.0; len];
            init.fill_f64(3, "a.weight", offset, &mut part);
            assert_eq!(part, all[offset..offset + len]);
        }
        let mut single = [0.0; 50];
        init.fill_f32(3, "a.weight", 0, &mut single);
        assert_eq!(single, all.map(|value| value as f32));
    }

    #[test]
    fn long_range_fill_matches_single_values() {
        let init = Init::Normal { std: 0.5 };
        let mut all = vec![0.0; 2 * PART_ELEMS + 5];
        init.fill_f64(3, "a.weight", 7, &mut all);
        assert!(init.values(3, "a.weight", 7).zip(&all).all(|(value, &got)| value == got));
    }

    #[test]
    fn table_is_normal_except_for_zero_row() {
        let plain: Vec<f64> = Init::Normal { std: 0.5 }.values(3, "t", 0).take(35).collect();
        let mut table = [1.0; 30];
        Init::Table { std: 0.5, width: 5, zero_row: 2 }.fill_f64(3, "t", 5, &mut table);
        for (index, value) in table.into_iter().enumerate() {
            let expected = if (10..15).contains(&(index + 5)) { 0.0 } else { plain[index + 5] };
            assert_eq!(value, expected, "element {index}");
        }
    }

    #[test]
    fn names_and_seeds_give_different_values() {
        let first = |seed, fqn: &str| Init::Normal { std: 1.0 }.values(seed, fqn, 0).next();
        assert_ne!(first(0, "a"), first(1, "a"));
        assert_ne!(first(0, "a"), first(0, "b"));
    }

    #[test]
    fn normal_init_has_requested_std() {
        let count = 20_000;
        let values = Init::Normal { std: 0.02 }.values(5, "w", 0).take(count);
        let variance = values.map(|value| value * value).sum::<f64>() / count as f64;
        assert!((variance.sqrt() / 0.02 - 1.0).abs() < 0.02);
    }
}
