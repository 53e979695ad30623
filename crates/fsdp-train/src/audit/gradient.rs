//! Judges the gradient that an update used.

use fsdp_core::DType;
use fsdp_core::model::ParamId;
use fsdp_nn::model::Architecture;

use super::report::{Cause, Finding, GradientRow, kind_of};
use super::scale::{Compared, number, shown};
use super::state::blocks;
use super::sums::{Around, Sample, Sums, clip, total};
use super::sweep::{Computation, Gradient, Sweep, tied};
use super::trial::{self, Trial};
use super::update::{self, Expected};
use super::{AuditError, MicroBatch, Variant};
use crate::error::TrainError;

/// Factor between the rounding errors of our kernels and those of another program: they round in other places.
const OTHER_KERNELS: f64 = 16.0;

/// Roundings of an element of the first moment in one update.
const MOMENT_ROUNDINGS: f64 = 4.0;

/// The worlds for which shards are compared.
const WORLDS: [usize; 6] = [2, 3, 4, 6, 8, 16];

/// A fault has to explain so much of the difference to be named.
const EXPLAINED_MIN: f64 = 0.95;

/// A share of the difference that dropout does not leave to other faults.
const HALF: f64 = 0.5;

/// Seeds with which the size of dropout's differences is measured.
const DROPOUT_SEEDS: u64 = 8;

/// With dropout, a gradient still points where it should.
const DROPOUT_COSINE_MIN: f64 = 0.6;

/// How far the logarithm of the differences may be from that with the tried rate: rates from 0.02 to 0.5 for 0.1.
const DROPOUT_RATE_ERROR: f64 = 1.2;

/// How far, as a root mean square, the logarithms of the differences of parameters may be from each other.
const DROPOUT_SPREAD_MAX: f64 = 0.35;

/// Relative distance from which weights count as others.
const MOVED_MIN: f64 = 1e-3;

/// The same for a fault that leaves the length of the gradient open, and so fits more easily.
const FREE_EXPLAINED_MIN: f64 = 0.999;

/// Judges gradients.
pub(super) struct Judge<'a, A> {
    pub(super) sweep: Sweep<'a>,
    pub(super) around: Around<'a>,
    pub(super) sound: Trial<'a, A>,
    pub(super) batches: &'a [MicroBatch],
    pub(super) variants: &'a [Variant<A>],
    /// Dtype in which the run computes.
    pub(super) param_dtype: DType,
    pub(super) grad_clip: Option<f64>,
    /// The weight decay of each parameter.
    pub(super) weight_decay: Vec<f64>,
    pub(super) progress: &'a dyn Fn(&str),
}

/// What was found about the gradient.
pub(super) struct Judged {
    pub(super) findings: Vec<Finding>,
    /// The squared distance between the used and the expected gradient.
    pub(super) distance2: f64,
    pub(super) params: Vec<GradientRow>,
    pub(super) groups: Vec<GradientRow>,
    pub(super) bound: f64,
}

impl<A: Architecture + Clone> Judge<'_, A> {
    /// Judges the gradient of the step.
    ///
    /// # Errors
    /// Errors of the model and of reading; [`TrainError::Stopped`].
    pub(super) fn judge(&mut self) -> Result<Judged, TrainError> {
        (self.progress)("computing the gradient of the step");
        let sound = self.sound.clone();
        let own = Sample::of(&self.gradient(&sound, self.param_dtype)?);
        let exact = self.gradient(&sound, wider(self.param_dtype))?;
        let noise = own.distances(&exact);
        let sums = self.around.compare(&exact)?;
        if let Some(index) = sums.iter().position(|sums| !(sums.uu + sums.pp + sums.ee).is_finite()) {
            let name = self.sweep.spec.params[index].fqn.clone();
            return Err(AuditError::NotFinite { name }.into());
        }
        let bounds = self.bounds(&sums, &noise);
        let compared = self.compared(&sums, &bounds);
        let findings = match compared.outside(compared.clip()).is_empty() {
            true => Vec::new(),
            false => self.explain(exact, &sums, &bounds)?,
        };
        let compared = self.compared(&sums, &bounds);
        let distance2 = compared.distance2(compared.clip());
        let params: Vec<GradientRow> = rows(&compared, |name| name.to_owned());
        let bound = params.iter().filter(|row| row.expected > 0.0).map(|row| row.bound).fold(0.0, f64::max);
        Ok(Judged { findings, distance2, groups: rows(&compared, kind_of), params, bound })
    }

    fn compared<'s>(&self, sums: &'s [Sums], bounds: &'s [f64]) -> Compared<'s>
    where
        Self: 's,
    {
        Compared { spec: self.sweep.spec, sums, bounds, grad_clip: self.grad_clip }
    }

    /// Computes the gradient of a trial.
    fn gradient(&mut self, trial: &Trial<'_, A>, dtype: DType) -> Result<Gradient, TrainError> {
        let computation = Computation {
            architecture: trial.architecture,
            terms: trial.terms,
            dtype,
            param_dtype: self.param_dtype,
            batches: &trial.batches,
            documents: trial.documents,
            hides_padding: trial.hides_padding,
            seed: trial.seed,
            tied: trial.tied,
        };
        let state = if trial.is_after { &mut self.around.after } else { &mut self.around.before };
        self.sweep.gradient(state, &computation)
    }

    /// For each parameter, the distance from the expected gradient that precision alone may cause: of the moments, of
    /// gradients in the dtype of the run, and of the kernels, for which our own error stands.
    fn bounds(&self, sums: &[Sums], noise: &[f64]) -> Vec<f64> {
        let factor = clip(self.grad_clip, total(sums).ee.sqrt());
        let elements: usize =
            self.sweep.spec.params.iter().filter(|param| param.trainable).map(|param| param.len()).sum();
        let unit = f64::from(f32::EPSILON) / 2.0;
        let floor = OTHER_KERNELS * unit * total(sums).ee.sqrt() * factor / (elements.max(1) as f64).sqrt();
        let gradient_unit = match self.param_dtype {
            DType::Bf16 => 2f64.powi(-8),
            DType::F16 => 2f64.powi(-11),
            _ => unit,
        };
        let moments = self.around.moments;
        let bound = |(index, (sums, noise)): (usize, (&Sums, &f64))| {
            let id = ParamId(index);
            let [before, after] = [&self.around.before, &self.around.after]
                .map(|state| state.moment_rounding(id, moments.first));
            let rounding =
                MOMENT_ROUNDINGS * after * sums.nn.sqrt() + before * moments.decay * sums.mm.sqrt();
            rounding / moments.gain
                + factor * (OTHER_KERNELS * noise + 2.0 * gradient_unit * sums.ee.sqrt())
                + floor * (self.sweep.spec.param(id).len() as f64).sqrt()
        };
        sums.iter().zip(noise).enumerate().map(bound).collect()
    }

    /// Looks for what explains the difference.
    fn explain(
        &mut self,
        exact: Gradient,
        sums: &[Sums],
        bounds: &[f64],
    ) -> Result<Vec<Finding>, TrainError> {
        let compared = self.compared(sums, bounds);
        if let Some(findings) = compared.explained() {
            return Ok(findings);
        }
        if let Some(finding) = self.by_moments(&compared) {
            return Ok(vec![finding]);
        }
        if let Some(finding) = self.by_ranks(&exact, &compared)? {
            return Ok(vec![finding]);
        }
        // From here on one gradient is held at a time.
        let sample = Sample::of(&exact);
        drop(exact);
        let missing = self.missing(&compared);
        let best = self.best_trial(sums, bounds)?;
        Ok(vec![match (best, missing) {
            (Some(best), _) if best.explains > 1.0 - 1e-6 => best,
            (_, Some(missing)) => missing,
            (Some(best), None) if best.explains >= EXPLAINED_MIN => best,
            (best, None) => {
                // What another fault explains in good part is not dropout, which no other fault resembles.
                let explained = best.map_or(0.0, |best| best.explains);
                let dropout = if explained < HALF { self.by_dropout(&sample, sums)? } else { None };
                dropout.unwrap_or_else(|| self.unexplained(&self.compared(sums, bounds)))
            }
        }])
    }

    /// Dropout draws masks that nobody can draw again; but how far it moves the gradient of each parameter is known up to a
    /// factor, its rate.
    fn by_dropout(&mut self, exact: &Sample, sums: &[Sums]) -> Result<Option<Finding>, TrainError> {
        let all = total(sums);
        if all.cosine().is_none_or(|cosine| cosine < DROPOUT_COSINE_MIN) {
            return Ok(None);
        }
        let relative = |sums: &Sums, factor: f64| (sums.distance2(factor) / sums.ee).sqrt() / factor;
        let coefficient = clip(self.grad_clip, all.ee.sqrt());
        let mut best: Option<(f64, &str)> = None;
        let variants = self.variants;
        for variant in variants.iter().filter(|variant| variant.is_random) {
            (self.progress)("trying dropout");
            let mut expected = vec![0.0; sums.len()];
            for seed in 0..DROPOUT_SEEDS {
                let mut trial = self.sound.clone();
                (trial.architecture, trial.seed) = (&variant.architecture, seed);
                let gradient = self.gradient(&trial, self.param_dtype)?;
                for (expected, distance) in expected.iter_mut().zip(exact.distances(&gradient)) {
                    *expected += distance * distance / DROPOUT_SEEDS as f64;
                }
            }
            let logs: Vec<f64> = (0..sums.len())
                .filter(|&index| sums[index].ee > 0.0 && expected[index] > 0.0)
                .map(|index| {
                    let size = (expected[index] / sums[index].ee).sqrt();
                    (relative(&sums[index], coefficient) / size).ln()
                })
                .collect();
            let mean = logs.iter().sum::<f64>() / logs.len().max(1) as f64;
            let spread =
                (logs.iter().map(|log| (log - mean).powi(2)).sum::<f64>() / logs.len().max(1) as f64).sqrt();
            if mean.abs() <= DROPOUT_RATE_ERROR && best.is_none_or(|best| spread < best.0) {
                best = Some((spread, &variant.text));
            }
        }
        Ok(best.filter(|best| best.0 <= DROPOUT_SPREAD_MAX).map(|(spread, text)| Finding {
            cause: Cause::DropoutActive,
            params: Vec::new(),
            factor: None,
            explains: 1.0 - spread * spread,
            text: format!(
                "{text}: gradients differ from those without it by as much as its random masks make them"
            ),
        }))
    }

    /// The first moment decays by another factor, or weight decay was added to the gradient.
    fn by_moments(&self, compared: &Compared<'_>) -> Option<Finding> {
        let coefficient = compared.clip();
        let is_decayed = |(index, sums): (usize, &Sums)| {
            let decay = self.weight_decay[index];
            let distance2 = sums.dd - 2.0 * decay * sums.dp + decay * decay * sums.pp;
            distance2.max(0.0).sqrt() <= compared.bounds[index]
        };
        if compared.sums.iter().enumerate().all(is_decayed) {
            return Some(Finding {
                cause: Cause::WeightDecay,
                params: Vec::new(),
                factor: None,
                explains: 1.0,
                text: "weight decay was added to the gradient (Adam with L2), not taken from the weights (AdamW)".to_owned(),
            });
        }
        let moments = self.around.moments;
        let all = total(compared.sums);
        let determinant = all.mm * all.ee - all.em * all.em;
        if determinant <= 0.0 {
            return None;
        }
        let decay = (all.mn * all.ee - all.en * all.em) / determinant;
        let gain = (all.en * all.mm - all.mn * all.em) / determinant;
        let is_explained = |(sums, bound): (&Sums, &f64)| {
            let left = sums.nn + decay * decay * sums.mm + gain * gain * sums.ee
                - 2.0 * decay * sums.mn
                - 2.0 * gain * sums.en
                + 2.0 * decay * gain * sums.em;
            left.max(0.0).sqrt() / moments.gain <= *bound
        };
        let is_other = (decay - moments.decay).abs() > 1e-4;
        (is_other && compared.sums.iter().zip(compared.bounds).all(is_explained)).then(|| Finding {
            cause: Cause::UpdateRule,
            params: Vec::new(),
            factor: None,
            explains: 1.0,
            text: format!(
                "the first moment decays by {} and takes up {} of the gradient; the run file says {} and {}",
                number(decay),
                number(gain / coefficient),
                number(moments.decay),
                number(moments.gain)
            ),
        })
    }

    /// The rows of some rank of some world have another factor.
    fn by_ranks(&mut self, exact: &Gradient, compared: &Compared<'_>) -> Result<Option<Finding>, TrainError> {
        let all = self.around.compare_shards(exact, &WORLDS)?;
        Ok(WORLDS.iter().zip(&all).find_map(|(ranks, by_param)| compared.of_ranks(by_param, *ranks)))
    }

    /// Parameters without any gradient, where those before them differ, too: what would have flowed through them.
    fn missing(&self, compared: &Compared<'_>) -> Option<Finding> {
        let is_missing = |index: &usize| {
            let Sums { uu, ee, .. } = compared.sums[*index];
            ee.sqrt() > 4.0 * compared.bounds[*index] && uu.sqrt() <= compared.bounds[*index]
        };
        let missing: Vec<usize> = (0..compared.sums.len()).filter(is_missing).collect();
        let blocks = &self.sweep.spec.blocks;
        let uses = |index: usize| blocks.iter().rposition(|block| block.params.contains(&ParamId(index)));
        let last = missing.iter().filter_map(|index| uses(*index)).max()?;
        let outside = compared.outside(compared.clip());
        let after = outside.iter().filter(|index| uses(**index).is_some_and(|block| block > last)).count();
        (after == 0).then(|| {
            let names = compared.names(&missing);
            let text = format!(
                "{} got no gradient, and what flows through them to earlier layers is missing, too",
                shown(&names)
            );
            Finding { cause: Cause::GradientMissing, params: names, factor: Some(0.0), explains: 1.0, text }
        })
    }

    /// Computes the steps with errors planted, until one explains everything; otherwise the best, if it is good.
    fn best_trial(&mut self, sums: &[Sums], bounds: &[f64]) -> Result<Option<Finding>, TrainError> {
        let is_tied = !tied(self.sweep.spec).is_empty();
        let (sound, variants) = (self.sound.clone(), self.variants);
        let trials = trial::all(&sound, self.batches, variants, is_tied);
        let whole = {
            let compared = self.compared(sums, bounds);
            compared.distance2(compared.clip())
        };
        let mut best: Option<Finding> = None;
        for (index, trial) in trials.iter().enumerate() {
            (self.progress)(&format!("trying fault {} of {}", index + 1, trials.len()));
            // Errors of `f32` are far below the bounds.
            let mut gradient = self.gradient(trial, DType::F32)?;
            let share = if trial.is_share { Some(self.share(&mut gradient)?) } else { None };
            let found = self.around.compare(&gradient)?;
            let compared = self.compared(&found, bounds);
            let factor = match trial.has_free_factor {
                true => total(&found).factor().unwrap_or(0.0),
                false => compared.clip(),
            };
            let explains = 1.0 - compared.distance2(factor) / whole;
            let is_all = compared.outside(factor).is_empty();
            if trial.has_free_factor && explains < FREE_EXPLAINED_MIN && !is_all {
                continue;
            }
            if best.as_ref().is_none_or(|best| explains > best.explains) || is_all {
                let text = match share {
                    None => trial.text.clone(),
                    Some(share) => format!("{} counts {} times", trial.text, number(share)),
                };
                let factor = share.or(trial.factor);
                let params = match trial.cause {
                    Cause::TiedGradientMissing => tied(self.sweep.spec).iter().map(|id| id.0).collect(),
                    _ => Vec::new(),
                };
                let params = compared.names(&params);
                best = Some(Finding { cause: trial.cause, params, factor, explains, text });
            }
            if is_all {
                break;
            }
        }
        Ok(best)
    }

    /// Replaces a gradient `t` by that point on the line from `t` to the exact one that is nearest to what was used, and
    /// returns where that is: 0 at `t`, 1 at the exact one.
    fn share(&mut self, gradient: &mut Gradient) -> Result<f64, TrainError> {
        let sound = self.sound.clone();
        let mut step = self.gradient(&sound, wider(self.param_dtype))?;
        step.iter_mut().flatten().zip(gradient.iter().flatten()).for_each(|(exact, other)| *exact -= other);
        let along = total(&self.around.compare(&step)?);
        let product = |left: &Gradient, right: &Gradient| -> f64 {
            let pairs = left.iter().flatten().zip(right.iter().flatten());
            pairs.map(|(left, right)| f64::from(*left) * f64::from(*right)).sum()
        };
        let share = (along.de + along.clip * along.ee - product(gradient, &step)) / along.ee;
        for (values, step) in gradient.iter_mut().flatten().zip(step.iter().flatten()) {
            *values += share as f32 * step;
        }
        Ok(share)
    }

    /// Tries whether the step began with other weights than the state before it has: those from which the update of the run
    /// file leads to the state after it.
    ///
    /// # Errors
    /// Errors of the model and of reading.
    pub(super) fn by_start(
        &mut self,
        whole: f64,
        expected: &Expected<'_>,
    ) -> Result<Option<Finding>, TrainError> {
        let spec = self.sweep.spec;
        let trial = Trial { is_after: true, ..self.sound.clone() };
        let Some(undo) = update::undo(expected) else { return Ok(None) };
        self.around.after.undo = Some(undo);
        let gradient = self.gradient(&trial, wider(self.param_dtype))?;
        let mut moved = Vec::new();
        for id in expected.settings.keys().copied() {
            let (mut distance2, mut length2) = (0.0, 0.0);
            for rows in blocks(spec, id) {
                let [before, start] =
                    [self.around.before.param(id, rows.clone())?, self.around.after.param(id, rows)?];
                let squares = before.iter().zip(&start).map(|(before, start)| (before - start).powi(2));
                distance2 += squares.sum::<f64>();
                length2 += before.iter().map(|value| value * value).sum::<f64>();
            }
            if distance2 > MOVED_MIN * MOVED_MIN * length2 {
                moved.push(id.0);
            }
        }
        self.around.after.undo = None;
        let found = self.around.compare(&gradient)?;
        let compared = self.compared(&found, &[]);
        let explains = 1.0 - compared.distance2(compared.clip()) / whole;
        Ok((explains >= EXPLAINED_MIN).then(|| {
            let names = compared.names(&moved);
            let text = format!(
                "the step did not begin with the weights of the state before it: {} had other values, as if they were not loaded",
                shown(&names)
            );
            Finding { cause: Cause::ModelDiffers, params: names, factor: None, explains, text }
        }))
    }

    fn unexplained(&self, compared: &Compared<'_>) -> Finding {
        let mut outside = compared.outside(compared.clip());
        outside.sort_by(|left, right| {
            compared.sums[*right].leftover().total_cmp(&compared.sums[*left].leftover())
        });
        let largest = compared.names(&outside[..1]);
        let all = total(compared.sums);
        let text = format!(
            "the gradient differs in {} of {} parameters, most in {}, and none of the known faults explains it (norm {} instead \
             of {}, cosine {})",
            outside.len(),
            compared.sums.iter().filter(|sums| sums.ee > 0.0 || sums.uu > 0.0).count(),
            shown(&largest),
            number(all.uu.sqrt()),
            number(all.ee.sqrt() * compared.clip()),
            all.cosine().map_or("undefined".to_owned(), number)
        );
        Finding {
            cause: Cause::Unexplained,
            params: compared.names(&outside),
            factor: None,
            explains: 0.0,
            text,
        }
    }
}

/// A dtype whose rounding errors are small beside those of another.
pub(super) fn wider(dtype: DType) -> DType {
    match dtype {
        DType::F32 | DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// Rows of a table, by a name for each parameter.
fn rows(compared: &Compared<'_>, name_of: impl Fn(&str) -> String) -> Vec<GradientRow> {
    let mut rows: Vec<(String, Sums, f64)> = Vec::new();
    for (index, param) in compared.spec.params.iter().enumerate().filter(|(_, param)| param.trainable) {
        let (name, sums, bound) = (name_of(&param.fqn), compared.sums[index], compared.bounds[index]);
        match rows.iter_mut().find(|row| row.0 == name) {
            Some(row) => *row = (name, row.1 + sums, row.2.hypot(bound)),
            None => rows.push((name, sums, bound)),
        }
    }
    let clip = compared.clip();
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
