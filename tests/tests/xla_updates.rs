//! Updates in steps compiled by XLA: Adafactor compared with the oracle, and whole runs with those of the host.

use std::collections::BTreeMap;
use std::path::Path;

use fsdp_ckpt::native::RunDir;
use fsdp_config::XlaReduction;
use fsdp_core::DType;
use fsdp_train::train::{Resume, train};
use fsdp_train::verify::{VerifyOptions, verify};
use fsdp_xla::{Devices, ProgramForm, ProgramOptions};

use crate::resume::tensors;
use crate::support::{GPT2, LLAMA, config, job, options, run_options, threads, tokens};
use crate::xla::{LAYERS, NATIVE, TREE, check, plugin, written_as};
use crate::xla_scan::deep;

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
fn compiled_adafactor_matches_oracle_at_every_world_size() {
    check((LLAMA, 61), &[1, 2, 4, 8], &[LAYERS, RELATIVE], ProgramOptions::default());
    // One unit, of which ranks hold different one-dimensional parameters.
    check((GPT2, 53), &[1, 2, 4], &[AVERAGED], ProgramOptions::default());
}

#[test]
fn compiled_bf16_adafactor_matches_oracle_on_replicas() {
    let mixed =
        [LAYERS, AVERAGED, "fsdp.mesh.replicate=2", "fsdp.param_dtype=\"bf16\"", "train.ema_decay=0.9"];
    check((LLAMA, 61), &[4], &mixed, written_as(NATIVE));
}

/// Parameters and optimizer state, by name.
type State = BTreeMap<String, Vec<f64>>;

/// Trains a model up to a step, from the newest checkpoint of the folder if there is one, and saves there. Returns the
/// content of the last checkpoint.
fn trained_of(model: (&str, u32), out: &Path, steps: u64, device: &str, overrides: &[&str]) -> State {
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
        let is_native = job.config.run.xla.reduction == XlaReduction::Native;
        let scan_layers = job.config.run.xla.scan_layers;
        let form = ProgramForm { scan_layers, ..if is_native { NATIVE } else { TREE } };
        let devices = Devices::new(&plugin().unwrap(), 8, written_as(form), options()).unwrap();
        train(&job, &devices, &options_of_run).unwrap();
    } else {
        train(&job, &threads(), &options_of_run).unwrap();
    }
    let in_double = job.plan.policy.param_dtype == DType::F64;
    let saved = tensors(&RunDir::new(out).checkpoint(steps));
    saved.into_iter().map(|(name, bytes)| (name, numbers(&bytes, in_double))).collect()
}

fn numbers(bytes: &[u8], in_double: bool) -> Vec<f64> {
    if in_double {
        return bytes.chunks_exact(8).map(|bytes| f64::from_le_bytes(bytes.try_into().unwrap())).collect();
    }
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()).into()).collect()
}

/// Like [`trained_of`], for a Llama.
fn trained(out: &Path, steps: u64, device: &str, overrides: &[&str]) -> State {
    trained_of((LLAMA, 61), out, steps, device, overrides)
}

/// Returns the largest difference of elements, relative to the largest element of their tensor.
fn distance([found, expected]: [State; 2]) -> f64 {
    assert!(found.keys().eq(expected.keys()));
    let mut most = 0f64;
    for (name, expected) in expected {
        let largest = expected.iter().fold(0f64, |largest, value| largest.max(value.abs()));
        for (found, expected) in found[&name].iter().zip(expected) {
            assert!(found.is_finite() && expected.is_finite(), "{name}: {found} for {expected}");
            most = most.max((found - expected).abs() / largest);
        }
    }
    most
}

const DOUBLE: [&str; 2] = ["fsdp.param_dtype=\"f64\"", "fsdp.reduce_dtype=\"f64\""];

/// Maximum ratio of the distance in f32 to 2^29 times the distance in f64.
const FACTOR: f64 = 8.0;

/// Checks that programs and host differ only by rounding, in runs that are equal but for their dtype (`distance` takes
/// overrides of the run file). In f64 the distance nearly vanishes, so both compute the same function. To first order,
/// the distance is linear in the rounding errors. Those of f32 are different ones, but equally many pass through the
/// same derivatives, and each is up to 2^29 times as large. The maxima of two such draws agree up to a small factor.
fn differ_by_rounding(what: &str, distance: impl Fn(&[&str]) -> f64) {
    /// Upper limit for the distance in f32, whatever it is in f64: 300 units in the last place.
    const MOST: f64 = 2e-5;
    let (single, double) = (distance(&[]), distance(&DOUBLE));
    println!("{what}: {single:e} in f32, {double:e} in f64");
    assert!(double <= 1e-13, "{what}: {double:e} in f64");
    let bound = (FACTOR * 2f64.powi(29) * double).min(MOST);
    assert!(single <= bound, "{what}: {single:e} in f32, {double:e} in f64");
}

/// The largest difference between the gradients of the first step and those of the oracle, over all elements and world
/// sizes, is bounded like that of whole runs. In f64 `verify` itself bounds it, by 7e-15 of the largest gradient.
#[test]
fn gradients_differ_from_oracle_only_by_rounding() {
    let Some(plugin) = plugin() else { return };
    for (name, model, wrap) in [
        ("llama", (LLAMA, 61), LAYERS),
        ("llama, recomputed", (LLAMA, 61), "fsdp.activation_checkpointing=\"full\""),
        ("gpt2 with dropout", (GPT2, 53), "fsdp.wrap=[\"GPT2Block\"]"),
    ] {
        let distance = |precision: &[&str]| {
            let dir = tempfile::tempdir().unwrap();
            let overrides = [&[wrap, "run.device=\"xla\""], precision].concat();
            let job = job(model.0, config(dir.path(), model.1, &overrides));
            let devices = Devices::new(&plugin, 8, ProgramOptions::default(), options()).unwrap();
            let report = verify(&job, &devices, &VerifyOptions::new(&[1, 2, 4, 8], 1)).unwrap();
            assert!(report.holds() && report.worlds.len() == 4, "{report:#?}");
            report.worlds.iter().map(|world| world.gradients.largest).fold(0.0, f64::max)
        };
        let (single, double) = (distance(&[]), distance(&DOUBLE));
        println!(
            "{name}: {single:e} in f32, {double:e} in f64, {} times 2^29",
            single / double / 2f64.powi(29)
        );
        assert!(single <= FACTOR * 2f64.powi(29) * double, "{name}: {single:e} in f32, {double:e} in f64");
    }
}

#[test]
fn compiled_runs_match_host_within_rounding() {
    if plugin().is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let check = |name: &str, model: (&str, u32), overrides: &[&str]| {
        differ_by_rounding(name, |precision| {
            let overrides = [overrides, precision].concat();
            distance(["xla", "cpu"].map(|device| {
                let out = dir.path().join(format!("{name}-{device}-{}", precision.len()));
                trained_of(model, &out, 4, device, &overrides)
            }))
        });
    };
    let native = "run.xla.reduction=\"native\"";
    let cases: [(&str, &[&str]); 12] = [
        ("one", &[LAYERS, RELATIVE, "run.ranks=1"]),
        ("two", &[AVERAGED, "run.ranks=2"]),
        ("four", &[LAYERS, AVERAGED, "run.ranks=4"]),
        ("native", &[LAYERS, ADAMW, "run.ranks=4", native]),
        ("native replicas", &[LAYERS, AVERAGED, "run.ranks=4", "fsdp.mesh.replicate=2", native]),
        ("replicas", &[LAYERS, RELATIVE, "run.ranks=4", "fsdp.mesh.replicate=2"]),
        ("adamw on one", &[LAYERS, ADAMW, "run.ranks=1"]),
        ("adamw on two", &[LAYERS, ADAMW, "run.ranks=2"]),
        ("adamw", &[LAYERS, ADAMW, "run.ranks=4", "train.ema_decay=0.9", "train.grad_clip=0.1"]),
        ("sgd", &[LAYERS, SGD, "run.ranks=2", SELECTIVE, "fsdp.reshard_after_forward=false"]),
        ("frozen", &[LAYERS, SGD, "run.ranks=2", "fsdp.frozen=[\"embed_tokens\", \"layers.0\"]"]),
        ("eight", &[LAYERS, ADAMW, "run.ranks=8", "fsdp.activation_checkpointing=\"full\""]),
    ];
    for (name, overrides) in cases {
        check(name, (LLAMA, 61), overrides);
    }
    // With dropout, whose masks must be the same.
    for ranks in [1, 2, 4, 8] {
        let (name, ranks) = (format!("gpt2 on {ranks}"), format!("run.ranks={ranks}"));
        check(&name, (GPT2, 53), &["fsdp.wrap=[\"GPT2Block\"]", &ADAMW.replace("norm", "ln_"), &ranks]);
    }
}

/// With layers in loops their parameters and state are stacks on the device. Evaluations before a start's first step and
/// between steps, checkpoints, and starts from checkpoints on other numbers of ranks see the same values as without.
#[test]
fn scanned_run_evaluates_saves_and_resumes_like_host() {
    if plugin().is_none() {
        return;
    }
    let llama = deep(LLAMA, 8);
    differ_by_rounding("layers in loops", |precision| {
        let dir = tempfile::tempdir().unwrap();
        let eval = format!("data.eval=[{{name='all', paths=['{}']}}]", tokens(dir.path(), 61, 100));
        let run = |name: &str, steps, device, own: &[&str]| {
            let every = [LAYERS, ADAMW, "train.ema_decay=0.9", "data.eval_every=1", &eval];
            let out = dir.path().join(name);
            let state = trained_of((&llama, 61), &out, steps, device, &[&every, own, precision].concat());
            (state, evaluations(&out))
        };
        let (expected, losses) = run("whole", 4, "cpu", &["run.ranks=4"]);
        run("part", 2, "xla", &["run.ranks=4", "run.xla.scan_layers=true"]);
        // As after a kill between checkpoint and evaluation, the next start evaluates first.
        let metrics = dir.path().join("part/metrics.jsonl");
        let lines = std::fs::read_to_string(&metrics).unwrap();
        let (kept, last) = lines.trim_end().rsplit_once('\n').unwrap();
        assert!(last.contains("eval_loss"), "{last}");
        std::fs::write(&metrics, format!("{kept}\n")).unwrap();
        run("part", 3, "xla", &["run.ranks=2", "run.xla.scan_layers=true"]);
        let (found, evaluated) = run("part", 4, "xla", &["run.ranks=1", "run.xla.scan_layers=true"]);
        assert_eq!((losses.len(), evaluated.len()), (4, 4), "after each step");
        for (found, expected) in evaluated.iter().zip(&losses) {
            // Losses are far less sensitive than parameters, whose distance is compared below.
            assert!((found - expected).abs() <= 1e-5 * expected, "{evaluated:?} for {losses:?}");
        }
        distance([found, expected])
    });
}

/// The losses of a run's evaluations, in order.
fn evaluations(out: &Path) -> Vec<f64> {
    let lines = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let value = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap();
    lines.lines().filter_map(|line| value(line)["eval_loss"].as_f64()).collect()
}

/// Two starts that both compile, with the same plugin and number of devices, give the same bits.
#[test]
fn recompiled_program_is_bitwise_equal() {
    if plugin().is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let run = |name: &str| trained(&dir.path().join(name), 3, "xla", &[LAYERS, ADAMW, "run.ranks=4"]);
    assert!(run("first") == run("second"));
}

/// State whose lengths differ between programs and checkpoints is preserved, also on other numbers of ranks.
#[test]
fn run_resumes_from_host_to_xla_and_back() {
    if plugin().is_none() {
        return;
    }
    differ_by_rounding("a run in parts", |precision| {
        let dir = tempfile::tempdir().unwrap();
        let run = |name: &str, steps, device, ranks| {
            let overrides = [&[LAYERS, AVERAGED, ranks], precision].concat();
            trained(&dir.path().join(name), steps, device, &overrides)
        };
        let expected = run("whole", 5, "cpu", "run.ranks=4");
        assert!(expected.keys().any(|name| name.contains("exp_avg_sq_row")), "{:?}", expected.keys());
        run("part", 1, "cpu", "run.ranks=2");
        run("part", 3, "xla", "run.ranks=4");
        run("part", 4, "xla", "run.ranks=2");
        let found = run("part", 5, "cpu", "run.ranks=1");
        distance([found, expected])
    });
}
