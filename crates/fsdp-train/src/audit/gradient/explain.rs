//! Looks for what explains a gradient that is wrong.

use fsdp_core::DType;
use fsdp_core::model::ParamId;
use fsdp_nn::model::Architecture;

use super::{Judge, WORLDS, wider};
use crate::audit::measure::Measured;
use crate::audit::report::{Cause, Finding};
use crate::audit::scale::{Compared, number, shown};
use crate::audit::state::blocks;
use crate::audit::sums::{Sums, clip, total};
use crate::audit::sweep::tied;
use crate::audit::trial::{self, Trial};
use crate::audit::update::{self, Expected};
use crate::error::TrainError;

/// A fault has to explain so much of the difference to be named.
const EXPLAINED_MIN: f64 = 0.95;

/// The same for a fault that leaves the length of the gradient open, and so fits more easily.
const FREE_EXPLAINED_MIN: f64 = 0.999;

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

impl<A: Architecture + Clone> Judge<'_, A> {
    /// Looks for what explains the difference.
    pub(super) fn explain(&mut self, exact: &Measured, bounds: &[f64]) -> Result<Vec<Finding>, TrainError> {
        let sums = &exact.sums[..];
        let compared = self.compared(sums, bounds);
        if let Some(findings) = compared.explained() {
            return Ok(findings);
        }
        if let Some(finding) = self.by_moments(&compared) {
            return Ok(vec![finding]);
        }
        let mut by_world = WORLDS.iter().zip(&exact.shards);
        if let Some(finding) = by_world.find_map(|(ranks, shards)| compared.of_ranks(shards, *ranks)) {
            return Ok(vec![finding]);
        }
        let missing = self.missing(&compared);
        let best = self.best_trial(exact, bounds)?;
        Ok(vec![match (best, missing) {
            (Some(best), _) if best.explains > 1.0 - 1e-6 => best,
            (_, Some(missing)) => missing,
            (Some(best), None) if best.explains >= EXPLAINED_MIN => best,
            (best, None) => {
                // What another fault explains in good part is not dropout, which no other fault resembles.
                let explained = best.map_or(0.0, |best| best.explains);
                let dropout = if explained < HALF { self.by_dropout(exact)? } else { None };
                dropout.unwrap_or_else(|| self.unexplained(&self.compared(sums, bounds)))
            }
        }])
    }

    /// Dropout draws masks that nobody can draw again; but how far it moves the gradient of each parameter is known up to a
    /// factor, its rate.
    fn by_dropout(&mut self, exact: &Measured) -> Result<Option<Finding>, TrainError> {
        let sums = &exact.sums[..];
        let all = total(sums);
        if all.cosine().is_none_or(|cosine| cosine < DROPOUT_COSINE_MIN) {
            return Ok(None);
        }
        let relative = |sums: &Sums, factor: f64| (sums.distance2(factor) / sums.ee).sqrt() / factor;
        let coefficient = clip(self.around.grad_clip, all.ee.sqrt());
        let mut best: Option<(f64, &str)> = None;
        let variants = self.variants;
        for variant in variants.iter().filter(|variant| variant.is_random) {
            (self.progress)("trying dropout");
            let mut expected = vec![0.0; sums.len()];
            for seed in 0..DROPOUT_SEEDS {
                let mut trial = self.sound.clone();
                (trial.architecture, trial.seed) = (&variant.architecture, seed);
                let other = self.measure(&trial, self.param_dtype, &[])?.sample;
                for (expected, distance) in expected.iter_mut().zip(exact.sample.distances(&other, self.spec))
                {
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

    /// Parameters without any gradient, where those before them differ, too: what would have flowed through them.
    fn missing(&self, compared: &Compared<'_>) -> Option<Finding> {
        let is_missing = |index: &usize| {
            let Sums { uu, ee, .. } = compared.sums[*index];
            ee.sqrt() > 4.0 * compared.bounds[*index] && uu.sqrt() <= compared.bounds[*index]
        };
        let missing: Vec<usize> = (0..compared.sums.len()).filter(is_missing).collect();
        let blocks = &self.spec.blocks;
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
    fn best_trial(&mut self, exact: &Measured, bounds: &[f64]) -> Result<Option<Finding>, TrainError> {
        let is_tied = !tied(self.spec).is_empty();
        let (sound, variants) = (self.sound.clone(), self.variants);
        let trials = trial::all(&sound, self.batches, variants, is_tied);
        let whole = {
            let compared = self.compared(&exact.sums, bounds);
            compared.distance2(compared.clip())
        };
        let mut best: Option<Finding> = None;
        for (index, trial) in trials.iter().enumerate() {
            (self.progress)(&format!("trying fault {} of {}", index + 1, trials.len()));
            // Errors of `f32` are far below the bounds.
            let mut trial = trial.clone();
            let share = if trial.is_share { Some(self.share(&mut trial, exact)?) } else { None };
            let found = self.measure(&trial, DType::F32, &[])?.sums;
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
                    Cause::TiedGradientMissing => tied(self.spec).iter().map(|id| id.0).collect(),
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

    /// Plants the share of the balancing loss that is nearest to what was used, and returns it: 0 for none, 1 for what the run
    /// file says.
    ///
    /// The gradient is t + share * a, where `t` is that without the loss and t + a the exact one.
    fn share(&mut self, trial: &mut Trial<'_, A>, exact: &Measured) -> Result<f64, TrainError> {
        let (stated, dtype) = (self.sound.terms.router_loss, wider(self.param_dtype));
        let mut with = |trial: &mut Trial<'_, A>, share: f64| {
            trial.terms.router_loss = share * stated;
            Ok::<_, TrainError>(total(&self.measure(trial, dtype, &[])?.sums))
        };
        let (none, half, all) = (with(trial, 0.0)?, with(trial, 0.5)?, total(&exact.sums));
        // Squares of lengths at three points of a line have all products of its vectors.
        let aa = 2.0 * (none.ee + all.ee - 2.0 * half.ee);
        let ta = (all.ee - none.ee - aa) / 2.0;
        let along = |sums: &Sums| sums.de + sums.clip * sums.ee;
        let (ut, ua) = (along(&none), along(&all) - along(&none));
        // Clipping leaves the length open.
        let scale = match self.around.grad_clip {
            Some(_) => (ut * aa - ua * ta) / (none.ee * aa - ta * ta),
            None => 1.0,
        };
        let share = (ua / scale - ta) / aa;
        // Nothing but rounding is nothing.
        let share = if share.abs() < 1e-5 { 0.0 } else { share };
        trial.terms.router_loss = share * stated;
        Ok(share)
    }

    /// Tries whether the step began with other weights than the state before it has: those from which the update of the run
    /// file leads to the state after it.
    ///
    /// # Errors
    /// Errors of the model and of reading.
    pub(in crate::audit) fn by_start(
        &mut self,
        whole: f64,
        expected: &Expected<'_>,
    ) -> Result<Option<Finding>, TrainError> {
        let spec = self.spec;
        let trial = Trial { is_after: true, ..self.sound.clone() };
        let Some(undo) = update::undo(expected) else { return Ok(None) };
        self.around.after.undo = Some(undo);
        let found = self.measure(&trial, wider(self.param_dtype), &[])?.sums;
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
