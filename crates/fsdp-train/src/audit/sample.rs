//! Some elements of a gradient.

use fsdp_core::model::{ModelSpec, ParamId, ParamSpec};

use super::state::blocks;
use super::sums::{Around, Sums};
use crate::error::TrainError;

/// Elements of each parameter that a sample has at most.
const SAMPLE_MAX: usize = 1 << 16;

/// The samples of all micro-batches may have about as many elements as so many whole samples.
pub(super) const WHOLE_SAMPLES: usize = 8;

/// Some elements of each parameter of a gradient, evenly spread: enough to estimate how far another gradient is from it,
/// without holding both.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    values: Vec<Vec<f32>>,
    /// Of large parameters, one in so many elements of a whole sample is there.
    thinned: usize,
}

impl Sample {
    /// A sample without elements.
    pub(super) fn new(spec: &ModelSpec) -> Self {
        Self { values: vec![Vec::new(); spec.params.len()], thinned: 1 }
    }

    /// Bytes of a sample at most.
    pub(super) fn bytes(spec: &ModelSpec) -> usize {
        let trained = spec.params.iter().filter(|param| param.trainable);
        trained.map(|param| taken(param) * size_of::<f32>()).sum()
    }

    /// The gradient that the update used.
    ///
    /// # Errors
    /// Errors of reading.
    pub(super) fn used(around: &mut Around<'_>) -> Result<Self, TrainError> {
        let spec = around.spec;
        let mut sample = Self::new(spec);
        for id in (0..spec.params.len()).map(ParamId).filter(|id| spec.param(*id).trainable) {
            let (len, row_len) = (spec.param(id).len(), spec.param(id).row_len().unwrap_or(1));
            for rows in blocks(spec, id) {
                let offset = rows.start * row_len;
                let used: Vec<f32> = around.used(id, rows)?.iter().map(|value| *value as f32).collect();
                sample.add(id, (offset, len), &used);
            }
        }
        Ok(sample)
    }

    /// Adds elements of a parameter from an offset on, in their order.
    pub(super) fn add(&mut self, id: ParamId, (offset, len): (usize, usize), values: &[f32]) {
        let step = step(len);
        let first = offset.next_multiple_of(step) - offset;
        self.values[id.0].extend(values.iter().skip(first).step_by(step));
    }

    /// Every so many elements of large parameters.
    pub(super) fn thinned(mut self, thinned: usize, spec: &ModelSpec) -> Self {
        let large = self.values.iter_mut().zip(&spec.params).filter(|(_, param)| is_large(param, thinned));
        for (values, _) in large {
            *values = values.iter().copied().step_by(thinned).collect();
        }
        Self { thinned, ..self }
    }

    /// The product with another sample of the same elements, for each parameter.
    pub(super) fn products(&self, other: &Sample, spec: &ModelSpec) -> Vec<f64> {
        let product = |left: &[f32], right: &[f32]| -> f64 {
            left.iter().zip(right).map(|(left, right)| f64::from(*left) * f64::from(*right)).sum()
        };
        self.with(other, spec).map(|(left, right, share)| share * product(left, right)).collect()
    }

    /// The square of what this gradient has where another one is zero, for each parameter.
    pub(super) fn outside(&self, other: &Sample, spec: &ModelSpec) -> Vec<f64> {
        let square = |(values, other): (&[f32], &[f32])| -> f64 {
            let outside = values.iter().zip(other).filter(|(_, other)| **other == 0.0);
            outside.map(|(value, _)| f64::from(*value).powi(2)).sum()
        };
        self.with(other, spec).map(|(values, other, share)| share * square((values, other))).collect()
    }

    /// The length of the difference from another gradient, for each parameter.
    pub(super) fn distances(&self, other: &Sample, spec: &ModelSpec) -> Vec<f64> {
        self.compared(1.0, (other, 1.0), spec).iter().map(|sums| sums.dd.sqrt()).collect()
    }

    /// Compares a multiple of another gradient with this one, clipped, as the one that the update used is compared.
    pub(super) fn compared(&self, clip: f64, (other, factor): (&Sample, f64), spec: &ModelSpec) -> Vec<Sums> {
        let sums = |(expected, values, share): (&[f32], &[f32], f64)| {
            let mut sums = Sums { clip, ..Sums::default() };
            for (e, u) in expected.iter().zip(values) {
                let (e, u) = (f64::from(*e), factor * f64::from(*u));
                let d = u - clip * e;
                sums.uu += share * u * u;
                sums.ee += share * e * e;
                sums.dd += share * d * d;
                sums.de += share * d * e;
            }
            sums
        };
        self.with(other, spec).map(sums).collect()
    }

    /// The elements of both samples by parameter, with the number of elements that each stands for: sums that are weighted so
    /// may be added up over parts of a parameter.
    fn with<'s>(
        &'s self,
        other: &'s Sample,
        spec: &'s ModelSpec,
    ) -> impl Iterator<Item = (&'s [f32], &'s [f32], f64)> {
        let share = move |param: &ParamSpec| {
            let thinned = if is_large(param, self.thinned) { self.thinned } else { 1 };
            param.len() as f64 / (taken(param).div_ceil(thinned).max(1)) as f64
        };
        let both = self.values.iter().zip(&other.values).zip(&spec.params);
        both.map(move |((left, right), param)| (&left[..], &right[..], share(param)))
    }
}

/// The number of elements of a parameter that a whole sample has.
fn taken(param: &ParamSpec) -> usize {
    param.len().div_ceil(step(param.len()))
}

/// Whether so few elements of a parameter are still a sample of it.
fn is_large(param: &ParamSpec, thinned: usize) -> bool {
    taken(param) >= thinned * thinned
}

/// The distance between two elements of a sample.
fn step(len: usize) -> usize {
    len.div_ceil(SAMPLE_MAX).max(1)
}

#[cfg(test)]
mod tests {
    use fsdp_core::scalars::Tallies;
    use proptest::prelude::*;

    use super::*;

    fn spec(len: usize) -> ModelSpec {
        let param = ParamSpec {
            fqn: "p".to_owned(),
            aliases: Vec::new(),
            shape: vec![len],
            trainable: true,
            expert: None,
            quantized: None,
            keep_f32: false,
        };
        ModelSpec {
            params: vec![param],
            modules: Vec::new(),
            blocks: Vec::new(),
            tallies: Tallies::default(),
        }
    }

    /// A sample of a vector, of which `parts` arrive one after the other.
    fn sampled(values: &[f32], part: usize, thinned: usize) -> Sample {
        let mut sample = Sample::new(&spec(values.len()));
        for (index, rows) in values.chunks(part).enumerate() {
            sample.add(ParamId(0), (index * part, values.len()), rows);
        }
        sample.thinned(thinned, &spec(values.len()))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn small_vectors_are_compared_element_by_element(
            // Not of `f32`: proptest 1.12 now and then fails to draw from a range of it.
            values in prop::collection::vec([-1.0f64..1.0, -1.0..1.0], 1..40),
            clip in 0.1f64..1.0,
            factor in 0.1f64..1.0,
        ) {
            let [left, right] = [0, 1].map(|at| values.iter().map(|pair| pair[at] as f32).collect::<Vec<f32>>());
            let sums = sampled(&left, 7, 1).compared(clip, (&sampled(&right, 3, 1), factor), &spec(left.len()));
            let slow: f64 =
                left.iter().zip(&right).map(|(e, u)| (factor * f64::from(*u) - clip * f64::from(*e)).powi(2)).sum();
            prop_assert!((sums[0].dd - slow).abs() < 1e-9, "{} instead of {slow}", sums[0].dd);
        }

        #[test]
        fn samples_of_constant_vectors_have_their_length(
            len in 1usize..400_000,
            part in 1000usize..100_000,
            thinned in 1usize..9,
        ) {
            let ones = sampled(&vec![1.0; len], part, thinned);
            prop_assert!(ones.values[0].len() <= SAMPLE_MAX);
            let square = ones.products(&ones, &spec(len))[0];
            prop_assert!((square - len as f64).abs() < 1e-6 * len as f64, "{square} instead of {len}");
        }
    }
}
