//! Compares a checkpoint with what a model wants. Trainers that load a checkpoint may leave what it lacks at random, and
//! save it again: such weights are there, and look like an initialization.

use std::path::Path;

use fsdp_ckpt::Error;
use fsdp_ckpt::checkpoint::{Checkpoint, Role};
use fsdp_ckpt::training::{Found, StateRows, Statistics, Wanted};
use fsdp_ckpt::transfer::Options;
use fsdp_core::model::{ModelSpec, ParamId};
use fsdp_nn::Init;
use fsdp_nn::hf::HfModel;
use fsdp_nn::layer::Description;
use fsdp_train::parameter_names;

use crate::error::CliError;
use crate::run_setup::read_model;
use crate::units::counted;

/// The states that say how far an optimizer has moved a parameter: Adam's, and that of momentum.
const MOVED: [&str; 2] = ["exp_avg", "momentum_buffer"];

/// Fewer elements say too little of their distribution.
const ELEMENTS_MIN: u64 = 1000;

/// Differences in standard deviations of what a sample of an initialization shows.
const DEVIATIONS_MAX: f64 = 4.0;

/// Reads the model of a directory.
///
/// # Errors
/// [`CliError`]: there is none, or it is of no known family.
pub(super) fn model(dir: &Path) -> Result<HfModel, CliError> {
    Ok(read_model(dir)?.build()?)
}

/// What differs from the model.
#[derive(Debug, Default)]
pub(super) struct Findings {
    /// What is missing, unexpected, of another shape, not finite, zero, or was never updated.
    pub(super) problems: Vec<String>,
    /// What looks as it was initialized, although short training may leave it so, and what could not be compared.
    pub(super) doubts: Vec<String>,
}

/// Compares a checkpoint with a model.
///
/// # Errors
/// [`Error::Canceled`]; other failures are part of the result.
pub(super) fn findings(
    checkpoint: &Checkpoint,
    model: &Description,
    options: &Options<'_>,
) -> Result<Findings, Error> {
    let mut weights = checkpoint.tensors.iter().filter(|(_, tensor)| tensor.role == Role::Model);
    if weights.any(|(name, _)| name.ends_with("_blocks") || name.contains(".quant_state")) {
        let doubts = vec!["weights in 4 bits are not compared with the model".to_owned()];
        return Ok(Findings { doubts, ..Findings::default() });
    }
    match of_values(checkpoint, model, options) {
        Err(Error::Canceled) => Err(Error::Canceled),
        Err(error) => Ok(Findings { problems: vec![error.to_string()], ..Findings::default() }),
        Ok(findings) => Ok(findings),
    }
}

fn of_values(checkpoint: &Checkpoint, model: &Description, options: &Options<'_>) -> Result<Findings, Error> {
    let spec = &model.spec;
    let found = find(checkpoint.clone(), spec)?;
    let mut findings = Findings::default();
    if let Some([first, second]) = found.tied_difference(options)? {
        findings.problems.push(format!("`{first}` and `{second}` are one tied parameter, but differ"));
    }
    let moved = |index: usize| found.states.as_ref().and_then(|states| states[index].first());
    let tensors = || found.weights.iter().flatten().chain((0..spec.params.len()).filter_map(moved));
    options.progress.begin(tensors().map(|name| found.checkpoint.tensors[name].len_bytes()).sum());
    let mut rows = StateRows::new(&found, Options { ..*options })?;
    let mut read = |name: &String, shape: &[usize]| {
        let statistics = rows.statistics(name, shape);
        options.progress.advance(found.checkpoint.tensors[name].len_bytes());
        statistics
    };
    let mut all = Vec::new();
    for (index, (param, weight)) in spec.params.iter().zip(&found.weights).enumerate() {
        let Some(weight) = weight else { continue };
        let values = read(weight, &param.shape)?;
        let moved = moved(index).map(|name| read(name, &param.shape)).transpose()?;
        all.push((weight, model.init(ParamId(index)), values, moved));
    }
    rows.finish()?;
    let some_moved = all.iter().any(|(.., moved)| moved.is_some_and(|moved| !moved.is_zero()));
    for (name, init, values, moved) in all {
        if let Some(what) = problem(init, &values, some_moved && moved.is_none_or(|moved| moved.is_zero())) {
            findings.problems.push(format!("`{name}` {what}"));
        } else if !some_moved && is_initial(init, &values) {
            findings.doubts.push(format!("`{name}` is distributed as at initialization"));
        }
    }
    Ok(findings)
}

/// Finds the model and, if parameters of its optimizer can be identified, how far they moved.
fn find(mut checkpoint: Checkpoint, spec: &ModelSpec) -> Result<Found, Error> {
    let has = |state: &&str| {
        let suffix = format!(".{state}");
        let states = checkpoint.tensors.iter().filter(|(_, tensor)| tensor.role == Role::Optimizer);
        states.into_iter().any(|(name, _)| name.ends_with(&suffix))
    };
    let state = MOVED.into_iter().find(has);
    let wanted = |state: Option<&str>| -> Vec<Wanted> {
        let params = spec.params.iter().map(|param| Wanted {
            names: parameter_names(param).map(str::to_owned).collect(),
            shape: param.shape.clone(),
            states: state.into_iter().map(|state| (state.to_owned(), param.shape.clone())).collect(),
            decays: param.shape.len() > 1,
            may_lack_states: true,
            is_base: false,
        });
        params.collect()
    };
    if state.is_some()
        && let Ok(found) = Found::new(checkpoint.clone(), &wanted(state))
    {
        return Ok(found);
    }
    checkpoint.tensors.retain(|_, tensor| tensor.role == Role::Model);
    Found::new(checkpoint, &wanted(None))
}

/// What is wrong with a parameter, if anything is; `is_still` if an optimizer moved others, but not this one.
fn problem(init: Init, values: &Statistics, is_still: bool) -> Option<String> {
    if let Some(first) = values.first_not_finite {
        let count = counted(values.not_finite as usize, "element");
        return Some(format!("is not finite in {count}, first in element {first}"));
    }
    if values.is_zero() && init != Init::Zeros {
        return Some("is zero in every element".to_owned());
    }
    is_still.then(|| "was never updated, but others were".to_owned())
}

/// Whether elements may be a sample of an initialization: by their mean, variance and fourth moment.
fn is_initial(init: Init, values: &Statistics) -> bool {
    let (variance, kurtosis) = match init {
        Init::Normal { std } => (std * std, 3.0),
        Init::Uniform { bound } => (bound * bound / 3.0, 1.8),
        _ => return false,
    };
    if values.elements < ELEMENTS_MIN || variance == 0.0 {
        return false;
    }
    let n = values.elements as f64;
    let [mean, square, fourth] = values.moments;
    // The variances of the three, for independent elements; that of the fourth power is at most that of a normal distribution's.
    let deviations = [
        mean / (variance / n).sqrt(),
        (square / variance - 1.0) / ((kurtosis - 1.0) / n).sqrt(),
        (fourth / (variance * variance) - kurtosis) / (96.0 / n).sqrt(),
    ];
    deviations.into_iter().all(|deviation| deviation.abs() < DEVIATIONS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn statistics(values: &[f64]) -> Statistics {
        let mean =
            |power: i32| values.iter().map(|value| value.powi(power)).sum::<f64>() / values.len() as f64;
        let zeros = values.iter().filter(|&&value| value == 0.0).count() as u64;
        Statistics {
            elements: values.len() as u64,
            zeros,
            moments: [mean(1), mean(2), mean(4)],
            ..Statistics::default()
        }
    }

    fn sample(init: Init, len: usize) -> Vec<f64> {
        let mut values = vec![0.0; len];
        init.fill_f64(3, "w", 0, &mut values);
        values
    }

    #[test]
    fn initial_values_are_recognized_and_trained_ones_are_not() {
        for init in [Init::Normal { std: 0.02 }, Init::Uniform { bound: 0.3 }] {
            for len in [1000, 100_000] {
                let initial = sample(init, len);
                assert!(is_initial(init, &statistics(&initial)), "{init:?}");
                // Larger or smaller by a fifth, moved to one side, or with a few large ones.
                let scaled: Vec<f64> = initial.iter().map(|value| value * 1.2).collect();
                let moved: Vec<f64> = initial.iter().map(|value| value + 0.05).collect();
                let mut spiked = initial.clone();
                spiked.iter_mut().step_by(100).for_each(|value| *value *= 6.0);
                for other in [scaled, moved, spiked] {
                    assert!(!is_initial(init, &statistics(&other)), "{init:?} {len}");
                }
            }
        }
        let few = sample(Init::Normal { std: 0.02 }, 64);
        assert!(!is_initial(Init::Normal { std: 0.02 }, &statistics(&few)), "few elements say too little");
    }

    #[test]
    fn zeros_and_missing_updates_are_named() {
        let zeros = statistics(&[0.0; 8]);
        assert_eq!(problem(Init::Zeros, &zeros, false), None);
        assert_eq!(problem(Init::Ones, &zeros, false).unwrap(), "is zero in every element");
        assert_eq!(
            problem(Init::Ones, &statistics(&[1.0; 8]), true).unwrap(),
            "was never updated, but others were"
        );
        let broken = Statistics { not_finite: 2, first_not_finite: Some(5), ..statistics(&[1.0; 8]) };
        assert_eq!(
            problem(Init::Ones, &broken, false).unwrap(),
            "is not finite in 2 elements, first in element 5"
        );
    }
}
