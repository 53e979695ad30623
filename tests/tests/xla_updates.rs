//! Updates in steps that XLA compiles: Adafactor's beside the oracle, and whole runs beside those of the host.

use std::collections::BTreeMap;
use std::path::Path;

use fsdp_ckpt::native::RunDir;
use fsdp_train::checkpoint::Resume;
use fsdp_train::train::train;
use fsdp_xla::{Devices, ProgramOptions};

use crate::resume::tensors;
use crate::support::{GPT2, LLAMA, config, job, options, run_options, threads};
use crate::xla::{LAYERS, NATIVE, check, plugin, written_as};

const RELATIVE: &str =
    "train.optimizer={ name = \"adafactor\", weight_decay = 0.1, no_decay = [\"norm\"], warmup_init = true }";
const AVERAGED: &str = "train.optimizer={ name = \"adafactor\", lr = 1e-2, relative_step = false, \
                        scale_parameter = false, beta1 = 0.9 }";

const ADAMW: &str =
    "train.optimizer={ name = \"adamw\", lr = 1e-2, eps = 1e-2, weight_decay = 0.1, no_decay = [\"norm\"] }";
const SGD: &str =
    "train.optimizer={ name = \"sgd\", lr = 0.1, momentum = 0.9, weight_decay = 0.1, no_decay = [\"norm\"] }";
const SELECTIVE: &str = "fsdp.activation_checkpointing=\"selective\"";

#[test]
fn adafactor_is_trained_at_every_world_size() {
    check((LLAMA, 61), &[1, 2, 4, 8], &[LAYERS, RELATIVE], ProgramOptions::default());
    // One unit, in which ranks hold other parameters of one dimension.
    check((GPT2, 53), &[1, 2, 4], &[AVERAGED], ProgramOptions::default());
}

#[test]
fn adafactor_is_trained_in_bf16_over_replicas_with_an_average() {
    let mixed =
        [LAYERS, AVERAGED, "fsdp.mesh.replicate=2", "fsdp.param_dtype=\"bf16\"", "train.ema_decay=0.9"];
    check((LLAMA, 61), &[4], &mixed, written_as(NATIVE));
}

/// Trains a model to a step, from the newest checkpoint of the folder if there is one, and saves there; what the last checkpoint
/// holds.
fn trained_of(
    model: (&str, u32),
    out: &Path,
    steps: u64,
    device: &str,
    overrides: &[&str],
) -> BTreeMap<String, Vec<f32>> {
    let own = [
        format!("run.out_dir={}", out.display()),
        format!("train.steps={steps}"),
        "checkpoint.every=1".to_owned(),
        format!("run.device=\"{device}\""),
    ];
    let data = tempfile::tempdir().unwrap();
    let overrides: Vec<&str> = overrides.iter().copied().chain(own.iter().map(String::as_str)).collect();
    let job = job(model.0, config(data.path(), model.1, &overrides));
    let options_of_run = run_options(Resume::Newest);
    if device == "xla" {
        let devices = Devices::new(&plugin().unwrap(), 8, ProgramOptions::default(), options()).unwrap();
        train(&job, &devices, &options_of_run).unwrap();
    } else {
        train(&job, &threads(), &options_of_run).unwrap();
    }
    let numbers = |bytes: Vec<u8>| -> Vec<f32> {
        bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
    };
    let saved = tensors(&RunDir::new(out).checkpoint(steps));
    saved.into_iter().map(|(name, bytes)| (name, numbers(bytes))).collect()
}

/// As [`trained_of`], of a Llama.
fn trained(out: &Path, steps: u64, device: &str, overrides: &[&str]) -> BTreeMap<String, Vec<f32>> {
    trained_of((LLAMA, 61), out, steps, device, overrides)
}

/// How far elements may be apart, beside the largest of their tensor: chosen, not derived. Gradients are apart by some
/// rounding errors of the largest one, and Adafactor divides those of small rows and columns by their size; AdamW would divide
/// each of them by its own, but for an `eps` that is not small beside them.
const TOLERANCE: f32 = 2e-5;

fn assert_near(found: &BTreeMap<String, Vec<f32>>, expected: &BTreeMap<String, Vec<f32>>) {
    assert!(found.keys().eq(expected.keys()));
    let mut most = 0f32;
    for (name, expected) in expected {
        let largest = expected.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        for (found, expected) in found[name].iter().zip(expected) {
            let distance = (found - expected).abs() / largest;
            assert!(distance <= TOLERANCE, "{name}: {found} for {expected}");
            most = most.max(distance);
        }
    }
    println!("at most {most:e} of the largest element");
}

#[test]
fn runs_end_where_those_of_the_host_do() {
    if plugin().is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let cases: [(&str, &[&str]); 8] = [
        ("one", &[LAYERS, RELATIVE, "run.ranks=1"]),
        ("two", &[AVERAGED, "run.ranks=2"]),
        ("four", &[LAYERS, AVERAGED, "run.ranks=4"]),
        ("replicas", &[LAYERS, RELATIVE, "run.ranks=4", "fsdp.mesh.replicate=2"]),
        ("adamw", &[LAYERS, ADAMW, "run.ranks=4", "train.ema_decay=0.9", "train.grad_clip=0.1"]),
        ("sgd", &[LAYERS, SGD, "run.ranks=2", SELECTIVE, "fsdp.reshard_after_forward=false"]),
        ("frozen", &[LAYERS, SGD, "run.ranks=2", "fsdp.frozen=[\"embed_tokens\", \"layers.0\"]"]),
        ("eight", &[LAYERS, ADAMW, "run.ranks=8", "fsdp.activation_checkpointing=\"full\""]),
    ];
    for (name, overrides) in cases {
        let [found, expected] = ["xla", "cpu"]
            .map(|device| trained(&dir.path().join(format!("{name}-{device}")), 4, device, overrides));
        assert_near(&found, &expected);
    }
    // With dropout, whose masks have to be the same.
    let gpt2 = ["fsdp.wrap=[\"GPT2Block\"]", "train.optimizer={ name = \"sgd\", lr = 0.1 }", "run.ranks=4"];
    let [found, expected] = ["xla", "cpu"]
        .map(|device| trained_of((GPT2, 53), &dir.path().join(format!("gpt2-{device}")), 4, device, &gpt2));
    assert_near(&found, &expected);
}

/// With one plugin and as many devices two starts, which both compile, have the same bits.
#[test]
fn what_is_compiled_again_has_the_same_bits() {
    if plugin().is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let run = |name: &str| trained(&dir.path().join(name), 3, "xla", &[LAYERS, ADAMW, "run.ranks=4"]);
    assert!(run("first") == run("second"));
}

/// State that has other lengths in programs than in checkpoints is what it was, on other ranks too.
#[test]
fn a_run_goes_on_from_the_host_to_programs_and_back() {
    if plugin().is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let out = |name: &str| dir.path().join(name);
    let expected = trained(&out("whole"), 5, "cpu", &[LAYERS, AVERAGED, "run.ranks=4"]);
    assert!(expected.keys().any(|name| name.contains("exp_avg_sq_row")), "{:?}", expected.keys());
    let parts = [
        (1, "cpu", "run.ranks=2"),
        (3, "xla", "run.ranks=4"),
        (4, "xla", "run.ranks=2"),
        (5, "cpu", "run.ranks=1"),
    ];
    let found =
        parts.map(|(steps, device, ranks)| trained(&out("part"), steps, device, &[LAYERS, AVERAGED, ranks]));
    assert_near(&found[3], &expected);
}
