//! Products of gradients.

use fsdp_core::model::ModelSpec;

use crate::audit::sample::Sample;

/// Products of the gradients of micro-batches with each other, and with the used one.
#[derive(Clone, Debug)]
pub(in crate::audit) struct Products {
    /// By two micro-batches.
    pub(super) pairs: Vec<Vec<f64>>,
    /// With the used gradient.
    pub(super) used: Vec<f64>,
    /// The square of the used gradient.
    pub(super) used2: f64,
}

/// Part of the mean square that is added to each, so that micro-batches that are alike share their weight.
const RIDGE: f64 = 1e-11;

impl Products {
    /// Those of each parameter.
    pub(in crate::audit) fn of(spec: &ModelSpec, parts: &[Sample], used: &Sample) -> Vec<Self> {
        let count = parts.len();
        let none = Self { pairs: vec![vec![0.0; count]; count], used: vec![0.0; count], used2: 0.0 };
        let mut all = vec![none; spec.params.len()];
        let mut add = |left: &Sample, right: &Sample, put: &dyn Fn(&mut Self, f64)| {
            all.iter_mut().zip(left.products(right, spec)).for_each(|(of, product)| put(of, product));
        };
        for left in 0..count {
            for right in 0..=left {
                add(&parts[left], &parts[right], &|of, product| {
                    (of.pairs[left][right], of.pairs[right][left]) = (product, product);
                });
            }
            add(&parts[left], used, &|of, product| of.used[left] = product);
        }
        add(used, used, &|of, product| of.used2 = product);
        all
    }

    /// The same with vectors that are longer: `square` times their squares.
    pub(in crate::audit) fn times(&self, square: f64) -> Self {
        let times = |values: &Vec<f64>| values.iter().map(|value| square * value).collect();
        Self {
            pairs: self.pairs.iter().map(times).collect(),
            used: times(&self.used),
            used2: square * self.used2,
        }
    }

    /// Sums over parameters, of which there are some.
    pub(in crate::audit) fn sum(all: &[Self]) -> Self {
        let add = |sum: Self, one: &Self| {
            let both = |left: &Vec<f64>, right: &Vec<f64>| -> Vec<f64> {
                left.iter().zip(right).map(|(left, right)| left + right).collect()
            };
            Self {
                pairs: sum.pairs.iter().zip(&one.pairs).map(|(left, right)| both(left, right)).collect(),
                used: both(&sum.used, &one.used),
                used2: sum.used2 + one.used2,
            }
        };
        all[1..].iter().fold(all[0].clone(), add)
    }

    /// The product of two sums of micro-batches.
    fn product(&self, left: &[f64], right: &[f64]) -> f64 {
        let row = |(pairs, count): (&Vec<f64>, &f64)| -> f64 {
            count * pairs.iter().zip(right).map(|(pair, count)| pair * count).sum::<f64>()
        };
        self.pairs.iter().zip(left).map(row).sum()
    }

    /// The product of a sum of micro-batches with the used gradient.
    fn with_used(&self, counts: &[f64]) -> f64 {
        self.used.iter().zip(counts).map(|(product, count)| product * count).sum()
    }

    /// The length of a sum of micro-batches.
    pub(super) fn norm(&self, counts: &[f64]) -> f64 {
        self.product(counts, counts).max(0.0).sqrt()
    }

    /// The multiple of a sum of micro-batches that is nearest to the used gradient.
    pub(super) fn scale(&self, counts: &[f64]) -> f64 {
        let square = self.product(counts, counts);
        if square > 0.0 { self.with_used(counts) / square } else { 0.0 }
    }

    /// The squared distance of the used gradient from the nearest multiple of a sum of micro-batches.
    pub(super) fn distance2(&self, counts: &[f64]) -> f64 {
        let scale = self.scale(counts);
        (self.used2 - 2.0 * scale * self.with_used(counts) + scale * scale * self.product(counts, counts))
            .max(0.0)
    }

    /// The number of times that one micro-batch and that all others count, if they explain the used gradient best: others,
    /// one. `None` if that cannot be told.
    pub(super) fn apart(&self, index: usize) -> Option<[f64; 2]> {
        let mut others = vec![1.0; self.used.len()];
        others[index] = 0.0;
        let mut one = vec![0.0; self.used.len()];
        one[index] = 1.0;
        let both = self.product(&others, &one);
        let squares = [self.product(&others, &others), self.product(&one, &one)];
        let two = Products {
            pairs: vec![vec![squares[0], both], vec![both, squares[1]]],
            used: vec![self.with_used(&others), self.with_used(&one)],
            used2: self.used2,
        };
        let found = two.nearest();
        (squares[0] > 0.0 && squares[1] > 0.0).then_some([found[0], found[1]])
    }

    /// How often each micro-batch counts if they explain the used gradient best. Those that are alike count alike.
    pub(super) fn nearest(&self) -> Vec<f64> {
        let count = self.used.len();
        let mean = (0..count).map(|index| self.pairs[index][index]).sum::<f64>() / count as f64;
        // Cholesky: pairs + ridge = lower * lower^T.
        let mut lower = vec![vec![0.0; count]; count];
        for row in 0..count {
            for column in 0..=row {
                let known: f64 = (0..column).map(|at| lower[row][at] * lower[column][at]).sum();
                let rest = self.pairs[row][column] - known;
                lower[row][column] = match row == column {
                    true => (rest + RIDGE * mean).max(RIDGE * mean).max(f64::MIN_POSITIVE).sqrt(),
                    false => rest / lower[column][column],
                };
            }
        }
        let mut found = self.used.clone();
        for row in 0..count {
            let known: f64 = (0..row).map(|at| lower[row][at] * found[at]).sum();
            found[row] = (found[row] - known) / lower[row][row];
        }
        for row in (0..count).rev() {
            let known: f64 = (row + 1..count).map(|at| lower[at][row] * found[at]).sum();
            found[row] = (found[row] - known) / lower[row][row];
        }
        found
    }
}
