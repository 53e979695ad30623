//! Judges the gradient that an update used.

mod dropout;
mod explain;
mod first;
mod micro_batches;
mod rounding;
mod search;
mod start;
mod trials;

use std::ops::Range;
use std::sync::atomic::AtomicBool;

use fsdp_core::DType;
use fsdp_core::model::{ModelSpec, ParamId};
use fsdp_nn::model::Architecture;
use fsdp_nn::{HostMemory, HostOptions};

use super::batch::MicroBatch;
use super::measure::{Measured, Split};
use super::report::{Finding, GradientRow, kind_of};
use super::scale::Compared;
use super::sums::{Around, Sums, clip, not_finite, total};
use super::sweep::Sweep;
use super::trial::Trial;
use super::variant::Setting;
use crate::error::TrainError;

/// Factor between the rounding errors of our kernels and those of another program: they round in other places.
pub(super) const OTHER_KERNELS: f64 = 16.0;

/// The largest relative error of rounding to `bf16`.
const BF16_UNIT: f64 = 1.0 / 256.0;

/// Roundings of an element of the first moment in one update.
const MOMENT_ROUNDINGS: f64 = 4.0;

/// Judges gradients.
pub(super) struct Judge<'a, A> {
    pub(super) spec: &'a ModelSpec,
    /// Compute threads.
    pub(super) threads: usize,
    pub(super) stop: &'a AtomicBool,
    pub(super) around: Around<'a>,
    pub(super) sound: Trial<A>,
    pub(super) batches: &'a [MicroBatch],
    pub(super) settings: &'a [Setting<A>],
    /// Dtype in which the run computes.
    pub(super) param_dtype: DType,
    /// Dtype in which the run reduces gradients.
    pub(super) reduce_dtype: DType,
    /// The weight decay of each parameter.
    pub(super) weight_decay: Vec<f64>,
    pub(super) progress: &'a dyn Fn(&str),
}

/// What was found about the gradient.
pub(super) struct Judged {
    pub(super) findings: Vec<Finding>,
    /// The squared distance between the used and the expected gradient.
    pub(super) distance2: f64,
    /// Of kinds of parameters, and of each.
    pub(super) rows: [Vec<GradientRow>; 2],
}

impl<A: Architecture + Clone> Judge<'_, A> {
    /// Judges the gradient of the step.
    ///
    /// # Errors
    /// Errors of the model and of reading; [`TrainError::Stopped`].
    pub(super) fn judge(&mut self) -> Result<Judged, TrainError> {
        (self.progress)("computing the gradient of the step");
        let sound = self.sound.clone();
        let own = self.measure(&sound, self.param_dtype, &[])?;
        self.around.near_clip = own.clip();
        let exact = self.measure(&sound, wider(self.param_dtype), &Split::all(self.spec))?;
        let noise = own.sample.distances(&exact.sample, self.spec);
        let own_norm = total(&own.sums).ee.sqrt();
        drop(own);
        let sums = exact.sums.clone();
        if let Some(index) = sums.iter().position(|sums| !(sums.uu + sums.pp + sums.ee).is_finite()) {
            return Err(not_finite(&self.spec.params[index].fqn));
        }
        let bounds = self.bounds(&sums, &noise, own_norm);
        let compared = self.compared(&sums, &bounds);
        let findings = match compared.outside(compared.clip()).is_empty() {
            true => Vec::new(),
            false => self.explain(&exact, &bounds)?,
        };
        let compared = self.compared(&sums, &bounds);
        let distance2 = compared.distance2(compared.clip());
        let named = |name_of: fn(&str) -> String| {
            let parts = parts(&compared).map(|(name, sums, bound)| (name_of(name), sums, bound));
            rows(parts, compared.clip())
        };
        Ok(Judged { findings, distance2, rows: [named(kind_of), named(str::to_owned)] })
    }

    /// Whether precision is enough for factors beside other faults, of which they could fit what is left otherwise.
    fn is_exact(&self) -> bool {
        matches!(self.param_dtype, DType::F32 | DType::F64)
    }

    fn compared<'s>(&self, sums: &'s [Sums], bounds: &'s [f64]) -> Compared<'s>
    where
        Self: 's,
    {
        Compared { spec: self.spec, sums, bounds, grad_clip: self.around.grad_clip }
    }

    /// Computes the gradient of a trial, and compares it with the one that was used; also what each rank of some splits holds.
    pub(super) fn measure(
        &mut self,
        trial: &Trial<A>,
        dtype: DType,
        splits: &[Split],
    ) -> Result<Measured, TrainError> {
        let computation = trial.computation(dtype, self.param_dtype);
        // Its storage is given back with it: other trials need other sizes.
        let memory = HostMemory::new(HostOptions { threads: self.threads, ..HostOptions::default() })?;
        let mut measured = Measured::new(self.spec, splits, self.around.near_clip);
        let mut visit = |around: &mut Around<'_>, id: ParamId, rows: Range<usize>, values: &[f32]| match trial
            .limit
            .map(|limit| limit as f32)
        {
            Some(limit) => {
                let clipped: Vec<f32> = values.iter().map(|value| value.clamp(-limit, limit)).collect();
                measured.add(around, id, rows, &clipped)
            }
            None => measured.add(around, id, rows, values),
        };
        let (stop, around, is_after) = (self.stop, &mut self.around, trial.is_after);
        Sweep { memory: &memory, stop, around, is_after }.gradient(&computation, &mut visit)?;
        Ok(measured.clipped(self.around.grad_clip))
    }

    /// For each parameter, the distance from the expected gradient that precision alone may cause: of the moments, of
    /// gradients in the dtype of the run, and of the kernels, for which our own error stands. Clipping spreads the error of the
    /// norm, to which all parameters add, over each of them.
    fn bounds(&self, sums: &[Sums], noise: &[f64], own_norm: f64) -> Vec<f64> {
        let norm = total(sums).ee.sqrt();
        let factor = clip(self.around.grad_clip, norm);
        let clip_error = clip_error(self.around.grad_clip, norm, own_norm);
        let elements: usize =
            self.spec.params.iter().filter(|param| param.trainable).map(|param| param.len()).sum();
        let unit = f64::from(f32::EPSILON) / 2.0;
        let floor = OTHER_KERNELS * unit * norm * factor / (elements.max(1) as f64).sqrt();
        let unit_of = |dtype: DType| match dtype {
            DType::Bf16 => BF16_UNIT,
            DType::F16 => 2f64.powi(-11),
            _ => unit,
        };
        let gradient_unit = unit_of(self.param_dtype).max(unit_of(self.reduce_dtype));
        let moments = self.around.moments;
        let bound = |(index, (sums, noise)): (usize, (&Sums, &f64))| {
            let id = ParamId(index);
            let [before, after] = self.around.first_roundings(id);
            let rounding =
                MOMENT_ROUNDINGS * after * sums.nn.sqrt() + before * moments.decay * sums.mm.sqrt();
            rounding / moments.gain
                + factor * (OTHER_KERNELS * noise + (2.0 * gradient_unit + clip_error) * sums.ee.sqrt())
                + floor * (self.spec.param(id).len() as f64).sqrt()
        };
        sums.iter().zip(noise).enumerate().map(bound).collect()
    }
}

/// The relative error of the coefficient of clipping that precision alone may cause, from the norm and its value in our own
/// precision; 0 if nothing is clipped.
fn clip_error(grad_clip: Option<f64>, norm: f64, own_norm: f64) -> f64 {
    let error = if norm > 0.0 { OTHER_KERNELS * (own_norm / norm - 1.0).abs() } else { 0.0 };
    match grad_clip {
        Some(max) if max < norm * (1.0 + error) => error,
        _ => 0.0,
    }
}

/// A dtype whose rounding errors are small beside those of another.
pub(super) fn wider(dtype: DType) -> DType {
    match dtype {
        DType::F32 | DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// The names, sums and bounds of the trained parameters.
fn parts<'c>(compared: &'c Compared<'_>) -> impl Iterator<Item = (&'c str, Sums, f64)> {
    let trained = compared.spec.params.iter().enumerate().filter(|(_, param)| param.trainable);
    trained.map(|(index, param)| (&*param.fqn, compared.sums[index], compared.bounds[index]))
}

/// Rows of a table: parts of one name in one row, beside what is expected after clipping.
pub(super) fn rows(parts: impl Iterator<Item = (String, Sums, f64)>, clip: f64) -> Vec<GradientRow> {
    let mut rows: Vec<(String, Sums, f64)> = Vec::new();
    for (name, sums, bound) in parts {
        match rows.iter_mut().find(|row| row.0 == name) {
            Some(row) => *row = (name, row.1 + sums, row.2.hypot(bound)),
            None => rows.push((name, sums, bound)),
        }
    }
    let row = |(name, sums, bound): (String, Sums, f64)| {
        let expected = sums.ee.sqrt() * clip;
        let relative = |length: f64| if expected > 0.0 { length / expected } else { length };
        GradientRow {
            name,
            expected,
            used: sums.uu.sqrt(),
            factor: sums.factor().map(|factor| factor / clip),
            cosine: sums.cosine(),
            residual: relative(sums.leftover()),
            bound: relative(bound),
        }
    };
    rows.into_iter().map(row).collect()
}

#[cfg(test)]
mod tests;
