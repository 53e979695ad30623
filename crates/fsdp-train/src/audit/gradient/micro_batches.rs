//! Whether micro-batches are added up otherwise.

use fsdp_core::DType;
use fsdp_nn::model::Architecture;

use super::Judge;
use super::trials::{Tried, Wrong};
use crate::audit::batch::MicroBatch;
use crate::audit::sample::{Sample, WHOLE_SAMPLES};
use crate::audit::weighting::{MicroBatches, Products};
use crate::error::TrainError;

impl<A: Architecture + Clone> Judge<'_, A> {
    /// Looks for weights of micro-batches that explain the used gradient: by samples of their gradients, and then by the
    /// gradient that they give.
    pub(super) fn by_micro_batches(&mut self, wrong: &Wrong<'_>) -> Result<Option<Tried>, TrainError> {
        let count = self.batches.len();
        if count < 2 {
            return Ok(None);
        }
        let step = count.div_ceil(WHOLE_SAMPLES);
        let mut parts = Vec::with_capacity(count);
        for index in 0..count {
            (self.progress)(&format!("computing the gradient of micro-batch {} of {count}", index + 1));
            let mut trial = self.sound.clone();
            trial.batches = vec![trial.batches.swap_remove(index)];
            parts.push(self.measure(&trial, DType::F32, &[])?.sample.thinned(step, self.spec));
        }
        let used = Sample::used(&mut self.around)?.thinned(step, self.spec);
        let weights: Vec<f64> =
            wrong.bounds.iter().map(|bound| if *bound > 0.0 { bound.powi(-2) } else { 0.0 }).collect();
        let tokens: Vec<usize> = self.batches.iter().map(MicroBatch::counted).collect();
        let plain = Products::of(self.spec, &parts, &used);
        let relative: Vec<Products> =
            plain.iter().zip(&weights).map(|(param, weight)| param.times(*weight)).collect();
        let found = MicroBatches {
            tokens: &tokens,
            relative: &Products::sum(&relative),
            each: if self.is_exact() { &relative } else { &[] },
            plain: &Products::sum(&plain),
            grad_clip: self.around.grad_clip,
            bound2: weights.iter().filter(|weight| **weight > 0.0).count() as f64,
        }
        .explained();
        let Some(found) = found else { return Ok(None) };
        drop(parts);
        let mut trial = self.sound.clone();
        (trial.has_free_factor, trial.says_length) = (true, found.leaves_length());
        (trial.cause, trial.text, trial.factor) = (found.cause, found.text, found.factor);
        trial.batches.iter_mut().zip(&found.counts).for_each(|((_, weight), count)| *weight *= count);
        self.tried(&trial, wrong)
    }
}
