//! Compares models of all families with transformers on PyTorch: loss, logits, gradients and SGD (`tests/golden`).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use fsdp_core::DType;

use super::Subject;
use super::models::{Outcome, Sample};
use super::safetensors;
use crate::backend::Backend;
use crate::hf::{HfConfig, HfModel};
use crate::model::Batch;
use fsdp_core::program::Pass;
use fsdp_core::schedule::Checkpointing;

pub(crate) const CASES: [&str; 4] = ["llama-gqa", "llama-tied", "llama-head-dim", "gpt2"];

pub(crate) struct Case {
    pub(crate) subject: Sample<HfModel>,
    pub(crate) batch: Batch,
    expected: BTreeMap<String, Vec<f64>>,
}

impl Case {
    pub(crate) fn load(folder: &Path, name: &str, config: &str, dtype: DType) -> Self {
        let folder = folder.join(name);
        let model = config_of(&folder.join(config)).build().unwrap();
        let mut subject = Sample::new(model, dtype);
        let files = safetensors::read(&folder.join("model.safetensors"));
        let tensors = files.into_iter().flat_map(|(tensor, values)| one_by_one(&subject, tensor, values));
        for (tensor, values) in tensors.collect::<Vec<_>>() {
            let index = subject.spec.params.iter().position(|param| param.fqn == tensor);
            let index = index.unwrap_or_else(|| panic!("{name} has no parameter {tensor}"));
            assert_eq!(values.len(), subject.values[index].len(), "{tensor}");
            subject.values[index] = values;
        }
        let expected = safetensors::read(&folder.join("expected.safetensors"));
        let batch = batch(&expected["ids"]);
        Self { subject, batch, expected }
    }

    pub(crate) fn run<M: Backend>(&self, memory: &M) -> Outcome {
        self.subject.run_on(memory, &self.batch, Pass::Train(Checkpointing::None))
    }

    /// Compares a tensor of every parameter; `band` is relative to the tensor's largest value.
    fn compare(&self, prefix: &str, tensors: &[Vec<f64>], band: f64) {
        let params = self.subject.spec.params.iter().zip(tensors);
        for (param, values) in params.filter(|(param, _)| param.trainable) {
            let name = format!("{prefix}.{}", param.fqn);
            close(&name, values, &self.expected[&name], band);
        }
    }
}

/// The parameters that a tensor holds: itself or, if it is a stack, those of all experts.
fn one_by_one(subject: &Sample<HfModel>, tensor: String, values: Vec<f64>) -> Vec<(String, Vec<f64>)> {
    let (stem, part) = tensor.rsplit_once('.').expect("names have several parts");
    let granite = [
        ("input_linear", &["gate_proj.weight", "up_proj.weight"][..]),
        ("output_linear", &["down_proj.weight"]),
    ];
    let renamed = granite.into_iter().find_map(|(name, parts)| Some((stem.strip_suffix(name)?, parts)));
    let (stem, parts) = match renamed {
        Some((mlp, parts)) => (format!("{mlp}experts"), parts),
        None => (stem.to_owned(), &[part][..]),
    };
    let all = (0..).flat_map(|expert| parts.iter().map(move |part| (expert, part)));
    let names = all.map(|(expert, part)| format!("{stem}.{expert}.{part}"));
    let exists = |name: &String| subject.spec.params.iter().any(|param| param.fqn == *name);
    let names: Vec<String> = names.take_while(exists).collect();
    if names.is_empty() {
        return vec![(tensor, values)];
    }
    let each = values.len() / names.len();
    names.into_iter().zip(values.chunks(each).map(<[f64]>::to_vec)).collect()
}

fn config_of(path: &PathBuf) -> HfConfig {
    HfConfig::parse(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn batch(ids: &[f64]) -> Batch {
    let (samples, len) = (4, ids.len() / 4);
    let part = |skip: usize| -> Vec<u32> {
        ids.chunks(len).flat_map(|sample| sample[skip..skip + len - 1].iter().map(|&id| id as u32)).collect()
    };
    Batch { ids: part(0), targets: part(1), samples: (0..samples).collect(), seq: len - 1, positions: None }
}

pub(crate) fn close(name: &str, got: &[f64], expected: &[f64], band: f64) {
    assert_eq!(got.len(), expected.len(), "{name}");
    let largest = expected.iter().fold(0.0f64, |largest, value| largest.max(value.abs()));
    let difference = got.iter().zip(expected).fold(0.0f64, |max, (a, b)| max.max((a - b).abs()));
    assert!(difference <= band * largest, "{name}: differs by {:e} of {largest:e}", difference / largest);
}

fn mean(outcome: &Outcome) -> Vec<Vec<f64>> {
    let scale = |values: &Vec<f64>| values.iter().map(|value| value / outcome.count as f64).collect();
    outcome.gradients.iter().map(scale).collect()
}

/// Checks that loss, logits, gradients and three steps of SGD of models of all families (each folder in `families`,
/// and the models in `CASES`) equal PyTorch's, within bands relative to the largest value of each tensor.
///
/// # Panics
/// If one does not, or `folder` lacks these files.
pub fn golden_models<M: Backend>(subject: &Subject<'_, M>, folder: &Path) {
    for name in CASES {
        single_precision(subject, folder, name);
        double_precision(subject, folder, name);
        three_sgd_steps(subject, folder, name);
        half_precision(subject, folder, name);
    }
    let families = folder.join("families");
    let all = std::fs::read_dir(&families).unwrap().map(|entry| entry.unwrap().file_name());
    for name in all.collect::<BTreeSet<_>>().iter().map(|name| name.to_str().unwrap()) {
        single_precision(subject, &families, name);
        three_sgd_steps(subject, &families, name);
    }
}

/// The band of tensors in f32. With linear attention, transformers' own f32 differs from its f64 by 1e-5 of a tensor's largest
/// value, and as much again from other orders of its sums.
fn band(name: &str) -> f64 {
    if name.starts_with("qwen3_5") || name.starts_with("qwen3_next") { 3e-5 } else { 1e-5 }
}

fn single_precision<M: Backend>(subject: &Subject<'_, M>, folder: &Path, name: &str) {
    let case = Case::load(folder, name, "config.json", DType::F32);
    let outcome = case.run(&(subject.memory)());
    close(name, &[outcome.loss / outcome.count as f64], &case.expected["loss"], 1e-6);
    close(name, &case.subject.logits(&(subject.memory)(), &case.batch), &case.expected["logits"], 1e-5);
    case.compare("grad", &mean(&outcome), band(name));
}

fn double_precision<M: Backend>(subject: &Subject<'_, M>, folder: &Path, name: &str) {
    let case = Case::load(folder, name, "config.json", DType::F64);
    let outcome = case.run(&(subject.memory)());
    // The rotary frequencies of Llama are in single precision.
    let band = if name == "gpt2" { 1e-12 } else { 1e-6 };
    close(name, &[outcome.loss / outcome.count as f64], &case.expected["loss64"], band);
    case.compare("grad64", &mean(&outcome), band);
}

fn three_sgd_steps<M: Backend>(subject: &Subject<'_, M>, folder: &Path, name: &str) {
    let mut case = Case::load(folder, name, "config.json", DType::F32);
    for step in 0..3 {
        let outcome = case.run(&(subject.memory)());
        let loss = outcome.loss / outcome.count as f64;
        close(name, &[loss], &case.expected["losses_sgd"][step..=step], 1e-5);
        for (values, gradient) in case.subject.values.iter_mut().zip(mean(&outcome)) {
            values.iter_mut().zip(gradient).for_each(|(value, slope)| {
                *value = f64::from((*value - 0.1 * slope) as f32);
            });
        }
    }
    // After three steps, transformers' own Gemma 3 in f32 differs from its f64 by 3.4e-5 of a tensor's largest value.
    let band = if name == "gemma3_text" { 7e-5 } else { band(name) };
    case.compare("sgd", &case.subject.values, band);
}

/// In bf16 an activation has a relative error of 2^-8 after every operation; a loss is a mean of many.
fn half_precision<M: Backend>(subject: &Subject<'_, M>, folder: &Path, name: &str) {
    let case = Case::load(folder, name, "config.json", DType::Bf16);
    let outcome = case.run(&(subject.memory)());
    close(name, &[outcome.loss / outcome.count as f64], &case.expected["loss"], 0.02);
    let gradients = mean(&outcome);
    let relative = |param: &str, got: &[f64], expected: &[f64]| {
        let norm =
            |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
        let error = norm(&mut got.iter().zip(expected).map(|(a, b)| a - b));
        let scale = norm(&mut expected.iter().copied());
        assert!(error <= 0.1 * scale, "{name}: the bf16 gradient of {param} is off by {:e}", error / scale);
    };
    for (param, gradient) in case.subject.spec.params.iter().zip(&gradients) {
        relative(&param.fqn, gradient, &case.expected[&format!("grad.{}", param.fqn)]);
    }
}
