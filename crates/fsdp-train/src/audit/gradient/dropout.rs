//! Whether dropout was active.

use std::ops::Range;

use fsdp_core::model::ParamId;
use fsdp_nn::model::Architecture;

use super::Judge;
use crate::audit::measure::Measured;
use crate::audit::report::{Cause, Finding};
use crate::audit::sample::Sample;
use crate::audit::sums::{Sums, total};
use crate::audit::variant::Setting;
use crate::error::TrainError;

/// With dropout, a gradient still points more where it should than elsewhere.
const COSINE_MIN: f64 = 0.1;

/// The rate with which places of dropout are compared.
const FIRST_RATE: f64 = 0.1;

/// Rates that somebody would use.
const RATES: Range<f64> = 0.01..0.6;

/// Seeds with which a place is looked at first.
const FIRST_SEEDS: u64 = 2;

/// Seeds that say what is usual.
const SEEDS: u64 = 20;

/// How far, as a root mean square, the logarithms of the sizes of differences may be from the first ones.
const FIRST_SPREAD_MAX: f64 = 0.6;

/// Places that are looked at closely.
const PLACES_MAX: usize = 3;

/// How much more unusual than the most unusual seed a gradient may be: in the sizes of its differences, and in their directions,
/// which depend more on the rate.
const UNUSUAL_MAX: [f64; 2] = [1.05, 1.5];

/// Errors of these features that are none: the logarithm of a size, a cosine.
const FEATURE_ERRORS: [f64; 2] = [0.05, 0.05];

/// The difference of a gradient from that without dropout, as it is in each parameter: the logarithm of its size, relative to
/// that of the gradient and to the mean of all, and the cosine of its angle with the gradient.
#[derive(Debug)]
struct Profile {
    /// The mean logarithm of sizes.
    mean: f64,
    features: Vec<[f64; 2]>,
}

impl Profile {
    fn of(sums: &[Sums], params: &[usize]) -> Self {
        let size =
            |sums: &Sums| 0.5 * (sums.dd / (sums.clip * sums.clip * sums.ee)).max(f64::MIN_POSITIVE).ln();
        let cosine = |sums: &Sums| sums.de / (sums.dd * sums.ee).max(f64::MIN_POSITIVE).sqrt();
        let mean = params.iter().map(|&index| size(&sums[index])).sum::<f64>() / params.len() as f64;
        let features =
            params.iter().map(|&index| [size(&sums[index]) - mean, cosine(&sums[index])]).collect();
        Self { mean, features }
    }

    /// How far each feature is from its mean over others, in their deviations, as root mean squares.
    fn unusual(&self, others: &[&Profile]) -> [f64; 2] {
        let count = others.len() as f64;
        std::array::from_fn(|feature| {
            let square = |(index, value): (usize, &[f64; 2])| {
                let of = |other: &&Profile| other.features[index][feature];
                let mean = others.iter().map(of).sum::<f64>() / count;
                let variance =
                    others.iter().map(|other| (of(other) - mean).powi(2)).sum::<f64>() / (count - 1.0);
                (value[feature] - mean).powi(2) / (variance + FEATURE_ERRORS[feature].powi(2))
            };
            (self.features.iter().enumerate().map(square).sum::<f64>() / self.features.len() as f64).sqrt()
        })
    }

    /// How far the sizes are from those of others, as a root mean square.
    fn spread(&self, others: &[Profile]) -> f64 {
        let square = |(index, value): (usize, &[f64; 2])| {
            let mean = others.iter().map(|other| other.features[index][0]).sum::<f64>() / others.len() as f64;
            (value[0] - mean).powi(2)
        };
        (self.features.iter().enumerate().map(square).sum::<f64>() / self.features.len() as f64).sqrt()
    }

    /// The rate that gives differences of these sizes, if another one gives those of others: their squares are as its odds.
    /// `None` if nobody would use it.
    fn rate(&self, others: &[Profile], rate: f64) -> Option<f64> {
        let mean = others.iter().map(|other| other.mean).sum::<f64>() / others.len() as f64;
        let odds = rate / (1.0 - rate) * (2.0 * (self.mean - mean)).exp();
        Some(odds / (1.0 + odds)).filter(|rate| RATES.contains(rate))
    }
}

/// Whether a profile is as those of others are beside each other.
fn is_usual(profile: &Profile, others: &[Profile]) -> bool {
    let beside = |index: usize| {
        let rest: Vec<&Profile> =
            others.iter().enumerate().filter(|(other, _)| *other != index).map(|(_, other)| other).collect();
        others[index].unusual(&rest)
    };
    let usual = (0..others.len())
        .map(beside)
        .fold([0.0; 2], |all: [f64; 2], one| [all[0].max(one[0]), all[1].max(one[1])]);
    let found = profile.unusual(&others.iter().collect::<Vec<_>>());
    (0..2).all(|feature| found[feature] <= UNUSUAL_MAX[feature] * usual[feature])
}

impl<A: Architecture + Clone> Judge<'_, A> {
    /// Dropout draws masks that nobody can draw again. But how far masks move the gradient of each parameter, and where to,
    /// is known up to their rate; and how far that is from mask to mask says whether the used gradient is one of them.
    pub(super) fn by_dropout(
        &mut self,
        exact: &Measured,
        bounds: &[f64],
    ) -> Result<Option<Finding>, TrainError> {
        let is_elsewhere = total(&exact.sums).cosine().is_none_or(|cosine| cosine < COSINE_MIN);
        if is_elsewhere || self.has_other_tokens(exact, bounds)? {
            return Ok(None);
        }
        let settings = self.settings;
        let mut places = Vec::new();
        for setting in settings.iter().filter(|setting| setting.is_random) {
            let Some(moved) = self.masked(exact, setting, FIRST_RATE, 0..FIRST_SEEDS)? else { continue };
            let params = moved_params(&exact.sums, &moved);
            if params.is_empty() {
                continue;
            }
            let found = Profile::of(&exact.sums, &params);
            let others: Vec<Profile> = moved.iter().map(|sums| Profile::of(sums, &params)).collect();
            let rate = found.rate(&others, FIRST_RATE);
            places.extend(rate.map(|rate| (found.spread(&others), setting, rate)));
        }
        places.retain(|(spread, ..)| *spread <= FIRST_SPREAD_MAX);
        places.sort_by(|left, right| left.0.total_cmp(&right.0));
        for (_, setting, rate) in places.into_iter().take(PLACES_MAX) {
            if let Some(finding) = self.dropped(exact, setting, rate)? {
                return Ok(Some(finding));
            }
        }
        Ok(None)
    }

    /// Whether embeddings of tokens that are not in the batch got a gradient, which no mask gives them.
    fn has_other_tokens(&mut self, exact: &Measured, bounds: &[f64]) -> Result<bool, TrainError> {
        let outside = Sample::used(&mut self.around)?.outside(&exact.sample, self.spec);
        let is_other = |id: &ParamId| outside[id.0].sqrt() > bounds[id.0];
        Ok(self.spec.blocks.first().is_some_and(|block| block.params.iter().any(is_other)))
    }

    /// Compares the gradient with those of masks in one place.
    fn dropped(
        &mut self,
        exact: &Measured,
        setting: &Setting<A>,
        mut rate: f64,
    ) -> Result<Option<Finding>, TrainError> {
        // The first rate is from few masks, and sizes do not quite grow with its odds.
        for is_last in [false, true] {
            let seeds = if is_last { SEEDS } else { 2 * FIRST_SEEDS };
            let Some(moved) = self.masked(exact, setting, rate, 0..seeds)? else { return Ok(None) };
            let params = moved_params(&exact.sums, &moved);
            if params.is_empty() {
                return Ok(None);
            }
            let found = Profile::of(&exact.sums, &params);
            let others: Vec<Profile> = moved.iter().map(|sums| Profile::of(sums, &params)).collect();
            if !is_last {
                let Some(other) = found.rate(&others, rate) else { return Ok(None) };
                rate = other;
                continue;
            }
            let spread = found.spread(&others);
            let text = (setting.model)(rate).map_or(String::new(), |variant| variant.text);
            let text = format!(
                "{text}: gradients differ from those without it by as much as its random masks make them"
            );
            let finding = Finding::of_all(Cause::DropoutActive, 1.0 - spread * spread, text);
            return Ok(is_usual(&found, &others).then_some(finding));
        }
        Ok(None)
    }

    /// Compares the gradients of some masks with that without, as the used one is; `None` if there is no such model.
    fn masked(
        &mut self,
        exact: &Measured,
        setting: &Setting<A>,
        rate: f64,
        seeds: Range<u64>,
    ) -> Result<Option<Vec<Vec<Sums>>>, TrainError> {
        let Some(variant) = (setting.model)(rate) else { return Ok(None) };
        let mut moved = Vec::new();
        for seed in seeds {
            (self.progress)("trying dropout");
            let mut trial = self.sound.clone();
            (trial.architecture, trial.seed) = (variant.architecture.clone(), seed);
            let masked = self.measure(&trial, self.param_dtype, &[])?;
            let other = (&masked.sample, masked.clip());
            moved.push(exact.sample.compared(exact.clip(), other, self.spec));
        }
        Ok(Some(moved))
    }
}

/// The parameters whose gradients masks move, and the used one is moved in, too.
fn moved_params(used: &[Sums], moved: &[Vec<Sums>]) -> Vec<usize> {
    let is_moved = |sums: &Sums| sums.ee > 0.0 && sums.dd > 0.0;
    (0..used.len())
        .filter(|&index| is_moved(&used[index]) && moved.iter().all(|sums| is_moved(&sums[index])))
        .collect()
}

#[cfg(test)]
mod tests;
