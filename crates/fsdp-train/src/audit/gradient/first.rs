//! What the first moment has taken up other than the gradient, and other shares of it.

use fsdp_core::DType;

use super::Judge;
use crate::audit::fit::Fit;
use crate::audit::moments::{Moments, written};
use crate::audit::report::{Cause, Finding, number, shown};
use crate::audit::scale::Compared;
use crate::audit::sums::{Sums, total};

/// Relative changes below this are none.
const CHANGE_MIN: f64 = 1e-4;

/// Relative error up to which a decay that was added to the gradient counts as that of the run file, or as none.
const DECAY_ERROR: f64 = 1e-2;

impl<A> Judge<'_, A> {
    /// Weight decay in the gradient that should not be there, or a first moment that takes up other shares; with how it does
    /// take up the gradient, if that is known exactly.
    pub(super) fn by_moments(&self, compared: &Compared<'_>) -> Option<(Finding, Option<Moments>)> {
        let moments = self.around.moments;
        if let Some(finding) = self.by_decay(compared) {
            return Some((finding, Some(moments)));
        }
        let fits: Vec<Fit> = compared
            .sums
            .iter()
            .zip(&self.around.coupled_decay)
            .map(|(sums, decay)| taken(sums, *decay, moments))
            .collect();
        let all = fits.iter().fold(Fit::default(), |all, one| all.with(*one));
        let is_explained = |change: &[f64; 2]| {
            let distances = fits.iter().map(|fit| fit.distance(*change) / moments.gain);
            distances.zip(compared.bounds).all(|(distance, bound)| distance <= *bound)
        };
        // Without decay in it, that is a factor of the gradient.
        let other_gain = moments.is_coupled.then(|| all.along([0.0, 1.0])).flatten().map(|gain| [0.0, gain]);
        let other_decay = moments.first.and_then(|_| all.nearest());
        let is_change = |change: &[f64; 2]| change[0].abs().max(change[1].abs() / moments.gain) > CHANGE_MIN;
        let change = other_gain.filter(is_explained).or_else(|| other_decay.filter(is_explained));
        let change = change.filter(is_change)?;
        let decay = written(moments.decay + change[0]);
        let gain = match change[0] {
            0.0 => moments.gain + change[1],
            _ => 1.0 - written(1.0 - (moments.gain + change[1])),
        };
        let left: f64 = fits.iter().map(|fit| (fit.distance(change) / moments.gain).powi(2)).sum();
        let explains = 1.0 - left / compared.distance2(compared.clip());
        let finding = Finding { explains, ..self.other_shares(decay, gain) };
        let is_exact = matches!(self.param_dtype, DType::F32 | DType::F64);
        Some((finding, is_exact.then_some(Moments { decay, gain, ..moments })))
    }

    /// Weight decay that was added to the gradient: the used one differs by a multiple of the parameters.
    fn by_decay(&self, compared: &Compared<'_>) -> Option<Finding> {
        let outside = compared.outside(compared.clip());
        let sums: Vec<Sums> = outside.iter().map(|&index| compared.sums[index]).collect();
        let all = total(&sums);
        let share = all.dp / all.pp;
        let left = |sums: &Sums| (sums.dd - 2.0 * share * sums.dp + share * share * sums.pp).max(0.0);
        let is_explained = |(sums, index): (&Sums, &usize)| left(sums).sqrt() <= compared.bounds[*index];
        if all.pp == 0.0 || !sums.iter().zip(&outside).all(is_explained) {
            return None;
        }
        let params = compared.names(&outside);
        let stated = self.weight_decay[outside[0]];
        let near = |value: f64, other: f64| (value - other).abs() <= DECAY_ERROR * other.abs().max(stated);
        let (factor, text) = match self.around.moments.is_coupled {
            true => {
                let found = if near(stated + share, 0.0) { 0.0 } else { stated + share };
                let text = format!(
                    "weight decay is {}, the run file says {} for {}",
                    number(found),
                    number(stated),
                    shown(&params)
                );
                ((stated > 0.0).then(|| found / stated), text)
            }
            false => {
                let size = if near(share, stated) { String::new() } else { format!(" of {}", number(share)) };
                let text = format!(
                    "weight decay{size} was added to the gradient (Adam with L2), not taken from the weights (AdamW)"
                );
                (None, text)
            }
        };
        let explains = 1.0 - left(&all) / all.dd;
        Some(Finding { cause: Cause::WeightDecay, params, factor, explains, text })
    }

    fn other_shares(&self, decay: f64, gain: f64) -> Finding {
        let moments = self.around.moments;
        let finding =
            |cause, factor, text| Finding { cause, params: Vec::new(), factor, explains: 1.0, text };
        if moments.first.is_none() {
            let rate = self.around.rates.iter().copied().fold(0.0, f64::max);
            let text = format!(
                "the learning rate is {}, the run file says {} for this step",
                number(gain * rate),
                number(rate)
            );
            return finding(Cause::LearningRate, Some(gain), text);
        }
        let text = format!(
            "the first moment decays by {} and takes up {} of the gradient; the run file says {} and {}",
            number(decay),
            number(gain),
            number(moments.decay),
            number(moments.gain)
        );
        finding(Cause::UpdateRule, None, text)
    }
}

/// What the first moment took up, less what it should have: as multiples of the moment before the step and of the gradient with
/// the decay that is added to it.
fn taken(sums: &Sums, decay: f64, moments: Moments) -> Fit {
    let Sums { clip, .. } = *sums;
    // Of the moment and the difference of the gradients.
    let dm = (sums.mn - moments.decay * sums.mm) / moments.gain - decay * sums.pm - clip * sums.em;
    Fit {
        aa: sums.mm,
        ab: clip * sums.em + decay * sums.pm,
        bb: clip * clip * sums.ee + 2.0 * clip * decay * sums.ep + decay * decay * sums.pp,
        ad: moments.gain * dm,
        bd: moments.gain * (clip * sums.de + decay * sums.dp),
        dd: moments.gain * moments.gain * sums.dd,
    }
}
