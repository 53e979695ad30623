//! Llama and GPT-2 against transformers on PyTorch: loss, logits, gradients and SGD (tests/golden).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fsdp_core::DType;

use super::harness::{Outcome, Subject};
use super::safetensors;
use crate::hf::{HfConfig, HfModel, TensorRole};
use crate::model::unsharded::Pass;
use crate::model::{Architecture, Batch};

const CASES: [&str; 4] = ["llama-gqa", "llama-tied", "llama-head-dim", "gpt2"];

struct Case {
    subject: Subject<HfModel>,
    batch: Batch,
    expected: BTreeMap<String, Vec<f64>>,
}

impl Case {
    fn load(name: &str, config: &str, dtype: DType) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name);
        let model = config_of(&folder.join(config)).build().unwrap();
        let mut subject = Subject::new(model, dtype);
        for (tensor, values) in safetensors::read(&folder.join("model.safetensors")) {
            let TensorRole::Param(id) = subject.architecture.tensor_role(&tensor) else {
                panic!("{name} has no parameter {tensor}");
            };
            assert_eq!(values.len(), subject.values[id.0].len(), "{tensor}");
            subject.values[id.0] = values;
        }
        let expected = safetensors::read(&folder.join("expected.safetensors"));
        let batch = batch(&expected["ids"]);
        Self { subject, batch, expected }
    }

    fn run(&self) -> Outcome {
        self.subject.run(&self.batch, Pass::Train)
    }

    /// Compares a tensor of every parameter within a fraction of the tensor's largest value.
    fn compare(&self, prefix: &str, tensors: &[Vec<f64>], band: f64) {
        for (param, values) in self.subject.spec.params.iter().zip(tensors) {
            let name = format!("{prefix}.{}", param.fqn);
            close(&name, values, &self.expected[&name], band);
        }
    }
}

fn config_of(path: &PathBuf) -> HfConfig {
    HfConfig::parse(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn batch(ids: &[f64]) -> Batch {
    let (samples, len) = (4, ids.len() / 4);
    let part = |skip: usize| -> Vec<u32> {
        ids.chunks(len).flat_map(|sample| sample[skip..skip + len - 1].iter().map(|&id| id as u32)).collect()
    };
    Batch { ids: part(0), targets: part(1), samples: (0..samples).collect(), seq: len - 1 }
}

pub(super) fn close(name: &str, got: &[f64], expected: &[f64], band: f64) {
    assert_eq!(got.len(), expected.len(), "{name}");
    let largest = expected.iter().fold(0.0f64, |largest, value| largest.max(value.abs()));
    let difference = got.iter().zip(expected).fold(0.0f64, |most, (a, b)| most.max((a - b).abs()));
    assert!(difference <= band * largest, "{name}: differs by {:e} of {largest:e}", difference / largest);
}

fn mean(outcome: &Outcome) -> Vec<Vec<f64>> {
    let scale = |values: &Vec<f64>| values.iter().map(|value| value / outcome.count as f64).collect();
    outcome.gradients.iter().map(scale).collect()
}

#[test]
fn loss_logits_and_gradients_are_those_of_pytorch() {
    for name in CASES {
        let case = Case::load(name, "config.json", DType::F32);
        let outcome = case.run();
        close(name, &[outcome.loss / outcome.count as f64], &case.expected["loss"], 1e-6);
        close(name, &case.subject.logits(&case.batch), &case.expected["logits"], 1e-5);
        case.compare("grad", &mean(&outcome), 1e-5);
    }
}

#[test]
fn double_precision_agrees_with_pytorch_in_double_precision() {
    for name in CASES {
        let case = Case::load(name, "config.json", DType::F64);
        let outcome = case.run();
        // The rotary frequencies of Llama are kept in single precision.
        let band = if name == "gpt2" { 1e-12 } else { 1e-6 };
        close(name, &[outcome.loss / outcome.count as f64], &case.expected["loss64"], band);
        case.compare("grad64", &mean(&outcome), band);
    }
}

#[test]
fn three_sgd_steps_are_those_of_pytorch() {
    for name in CASES {
        let mut case = Case::load(name, "config.json", DType::F32);
        for step in 0..3 {
            let outcome = case.run();
            let loss = outcome.loss / outcome.count as f64;
            close(name, &[loss], &case.expected["losses_sgd"][step..=step], 1e-5);
            for (values, gradient) in case.subject.values.iter_mut().zip(mean(&outcome)) {
                values.iter_mut().zip(gradient).for_each(|(value, slope)| {
                    *value = f64::from((*value - 0.1 * slope) as f32);
                });
            }
        }
        case.compare("sgd", &case.subject.values, 1e-5);
    }
}

#[test]
fn both_spellings_of_a_configuration_are_the_same_model() {
    for name in CASES {
        let new = Case::load(name, "config.json", DType::F32);
        let old = Case::load(name, "config.transformers-4.json", DType::F32);
        assert_eq!(new.subject.architecture.description(), old.subject.architecture.description());
        assert_eq!(new.run(), old.run());
    }
}

#[test]
fn published_gpt2_names_are_known() {
    let case = Case::load("gpt2", "config.json", DType::F32);
    let model = &case.subject.architecture;
    let TensorRole::Param(id) = model.tensor_role("h.1.attn.c_attn.weight") else {
        panic!("names without `transformer.` are parameters")
    };
    assert_eq!(case.subject.spec.param(id).fqn, "transformer.h.1.attn.c_attn.weight");
    assert!(matches!(model.tensor_role("lm_head.weight"), TensorRole::Alias(_)));
    assert_eq!(model.tensor_role("h.0.attn.bias"), TensorRole::Constant);
    assert_eq!(model.tensor_role("h.0.attn.c_attn"), TensorRole::Unknown);
}
