//! Files that versions have written (tests/golden/versions): run files mean what they meant, and native checkpoints are
//! read and continued. A version keeps its files when it is released:
//!
//! ```sh
//! KEEP_VERSION=1 cargo test --workspace --test tests this_version
//! ```
//!
//! Nothing that exists is replaced: what a released version has written stays as it is.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use fsdp_ckpt::native::{NativeReader, RunDir};
use fsdp_config::{Resolved, schema};
use fsdp_nn::hf::{HfConfig, HfModel};
use fsdp_nn::model::{Adapted, Architecture};
use fsdp_train::metrics::StepMetrics;
use fsdp_train::train::{Reporter, Resume, RunOptions, train};
use fsdp_train::{InitSource, Job, adapter};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::support::{run_options, threads};

/// From the folder that tests run in: paths are written into what is kept, and must not be those of one machine.
const KEPT: &str = "golden/versions";
/// How many minor versions before this one are read.
const READ_BACK: u32 = 2;
/// The first version that has kept files.
const FIRST_MINOR: u32 = 1;
/// The step of the kept checkpoints. The runs go on for two more.
const KEPT_STEP: u64 = 3;
/// Relative tolerance of losses and gradient norms: processors differ in the last bits.
const SCALARS: f64 = 1e-5;
/// The same with 8-bit moments or f16, where a last bit may become a step of a coarse scale.
const COARSE_SCALARS: f64 = 2e-2;

/// Returns the folders of the versions that this one has to read, its own last.
fn versions() -> Vec<PathBuf> {
    let (major, minor) = (env!("CARGO_PKG_VERSION_MAJOR"), env!("CARGO_PKG_VERSION_MINOR"));
    let minor: u32 = minor.parse().unwrap();
    let oldest = minor.saturating_sub(READ_BACK).max(FIRST_MINOR);
    (oldest..=minor).map(|minor| Path::new(KEPT).join(format!("{major}.{minor}"))).collect()
}

/// Returns what is in a folder, in order; nothing if there is none.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut entries: Vec<PathBuf> =
        fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    entries
}

/// Returns the run files that are only read.
fn run_files(version: &Path) -> Vec<PathBuf> {
    let mut files = entries(&version.join("run-files"));
    files.retain(|path| path.extension().is_some_and(|extension| extension == "toml"));
    files
}

/// Returns the folders with a run file and a checkpoint.
fn trained(version: &Path) -> Vec<PathBuf> {
    entries(&version.join("trained"))
}

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn value(path: &Path) -> Value {
    serde_json::from_str(&text(path)).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Writes a file for people to read, if it does not exist.
fn keep(path: &Path, value: &Value) {
    if !path.exists() {
        fs::write(path, serde_json::to_string_pretty(value).unwrap() + "\n").unwrap();
    }
}

/// Reads a run file; all defaults are in the result.
fn resolved(run_file: &Path) -> Value {
    let loaded = Resolved::load(run_file, &[]).unwrap_or_else(|error| panic!("{error}"));
    serde_json::to_value(&loaded.config).unwrap()
}

fn expectation(run_file: &Path) -> PathBuf {
    run_file.with_extension("json")
}

/// Panics if a key of the old value has another value now, or none. Keys may have been added.
fn expect_meaning(old: &Value, new: &Value, place: &str) {
    if let Value::Object(fields) = old {
        for (key, value) in fields {
            let now = new.get(key).unwrap_or_else(|| panic!("{place}.{key} is not read"));
            expect_meaning(value, now, &format!("{place}.{key}"));
        }
    } else if let (Value::Array(old), Value::Array(new)) = (old, new) {
        assert_eq!(old.len(), new.len(), "{place}");
        for (index, (old, new)) in old.iter().zip(new).enumerate() {
            expect_meaning(old, new, &format!("{place}[{index}]"));
        }
    } else {
        assert_eq!(old, new, "{place}");
    }
}

#[test]
fn changed_and_missing_keys_are_noticed() {
    let old = json!({"a": [{"b": 1}], "c": "x"});
    expect_meaning(&old, &json!({"a": [{"b": 1, "new": 2}], "c": "x", "d": 1}), "run");
    for new in [json!({"a": [{"b": 2}], "c": "x"}), json!({"a": [{"b": 1}]}), json!({"a": [], "c": "x"})] {
        assert!(std::panic::catch_unwind(|| expect_meaning(&old, &new, "run")).is_err(), "{new}");
    }
}

#[test]
fn run_files_of_versions_mean_what_they_meant() {
    let mut seen = 0;
    for file in versions().iter().flat_map(|version| run_files(version)) {
        expect_meaning(&value(&expectation(&file)), &resolved(&file), &file.display().to_string());
        seen += 1;
    }
    assert!(seen > 0);
}

/// Losses and gradient norms of the steps of a run.
#[derive(Debug, Default)]
struct Steps(Mutex<Vec<(u64, f64, f64)>>);

impl Reporter for Steps {
    fn step(&self, metrics: &StepMetrics) {
        self.0.lock().unwrap().push((metrics.step, metrics.loss, metrics.grad_norm));
    }
}

/// Creates the job of a run file, with the model and the tokens of its version.
fn job(run_file: &Path, out: &Path) -> Job<Adapted<HfModel>> {
    let version = run_file.ancestors().nth(3).unwrap();
    let place = |key: &str, path: &Path| format!("{key}={}", json!(path));
    let overrides = [
        place("model.path", version),
        format!("data.train={}", json!([version.join("tokens.bin")])),
        place("run.out_dir", out),
    ];
    let config = Resolved::load(run_file, &overrides).unwrap_or_else(|error| panic!("{error}")).config;
    let model = HfConfig::parse(&text(&version.join("config.json"))).unwrap().build().unwrap();
    let model = adapter::adapt(&config, model).unwrap();
    let base =
        InitSource::Random { seed: config.model.seed, init: Arc::new(model.description().init.clone()) };
    let init = base.adapted(&config, model.description(), None).unwrap();
    Job::new(config, model, init).unwrap_or_else(|error| panic!("{error}"))
}

/// Trains, and returns what each step reported.
fn run(run_file: &Path, out: &Path, resume: Resume) -> Vec<(u64, f64, f64)> {
    let steps = Steps::default();
    let config_json = Some("{}".to_owned());
    let options = RunOptions { reporter: &steps, config_json, ..run_options(resume) };
    train(&job(run_file, out), &threads(), &options).unwrap_or_else(|error| panic!("{error}"));
    steps.0.into_inner().unwrap()
}

/// Describes every tensor of a checkpoint, and its content by a checksum that is not ours.
fn tensors(checkpoint: &Path) -> Value {
    let reader = NativeReader::open(checkpoint).unwrap_or_else(|error| panic!("{error}"));
    let described = reader.manifest().tensors.iter().map(|(name, tensor)| {
        let rows = tensor.shape.first().copied().unwrap_or(1);
        let mut bytes = vec![0; tensor.shape.iter().product::<usize>() * tensor.dtype.size_bytes()];
        reader.read_rows(name, 0..rows, &mut bytes).unwrap_or_else(|error| panic!("{error}"));
        let sha256: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        let dtype = format!("{:?}", tensor.dtype).to_lowercase();
        (name.clone(), json!({"dtype": dtype, "shape": tensor.shape, "sha256": sha256}))
    });
    Value::Object(described.collect())
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for file in entries(from) {
        fs::copy(&file, to.join(file.file_name().unwrap())).unwrap();
    }
}

#[test]
fn checkpoints_of_versions_keep_every_bit() {
    let mut seen = 0;
    for folder in versions().iter().flat_map(|version| trained(version)) {
        let expected = value(&folder.join("expected.json"));
        assert_eq!(tensors(&folder.join("checkpoint")), expected["tensors"], "{}", folder.display());
        seen += expected["tensors"].as_object().unwrap().len();
    }
    assert!(seen > 0);
}

#[test]
fn runs_of_versions_continue_from_their_checkpoints() {
    for folder in versions().iter().flat_map(|version| trained(version)) {
        let run_file = folder.join("run.toml");
        let expected: Vec<(u64, f64, f64)> =
            serde_json::from_value(value(&folder.join("expected.json"))["steps"].clone()).unwrap();
        assert_eq!(expected.iter().map(|step| step.0).collect::<Vec<_>>(), [4, 5]);
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        copy(&folder.join("checkpoint"), &RunDir::new(&out).checkpoint(KEPT_STEP));
        let is_coarse =
            ["adamw8bit", "f16"].iter().any(|word| text(&run_file).contains(&format!("\"{word}\"")));
        let tolerance = if is_coarse { COARSE_SCALARS } else { SCALARS };
        let is_near = |got: f64, expected: f64| (got - expected).abs() <= tolerance * expected.abs();
        let steps = run(&run_file, &out, Resume::Newest);
        assert_eq!(steps.len(), expected.len(), "{}", folder.display());
        for (got, expected) in steps.iter().zip(&expected) {
            let fits = got.0 == expected.0 && is_near(got.1, expected.1) && is_near(got.2, expected.2);
            assert!(fits, "{}: {got:?} instead of {expected:?}", folder.display());
        }
    }
}

/// Trains a run of this version, and keeps its checkpoint and its steps.
fn keep_trained(folder: &Path) {
    let expected = folder.join("expected.json");
    if expected.exists() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let steps = run(&folder.join("run.toml"), dir.path(), Resume::Fresh);
    let checkpoint = folder.join("checkpoint");
    copy(&RunDir::new(dir.path()).checkpoint(KEPT_STEP), &checkpoint);
    let later: Vec<_> = steps.into_iter().filter(|step| step.0 > KEPT_STEP).collect();
    keep(&expected, &json!({"tensors": tensors(&checkpoint), "steps": later}));
}

/// Adds the keys of a schema of run files, as `table.key`.
fn keys_of_schema(schema: &Value, place: &str, keys: &mut BTreeSet<String>) {
    let alternatives = ["anyOf", "oneOf", "allOf"].iter().filter_map(|key| schema[key].as_array()).flatten();
    for part in alternatives.chain(schema.get("items")) {
        keys_of_schema(part, place, keys);
    }
    for (key, part) in schema["properties"].as_object().into_iter().flatten() {
        let place = format!("{place}.{key}");
        keys_of_schema(part, &place, keys);
        keys.insert(place);
    }
}

/// Removes the keys of a run file.
fn remove_keys(run_file: &Value, place: &str, keys: &mut BTreeSet<String>) {
    for (key, value) in run_file.as_object().into_iter().flatten() {
        let place = format!("{place}.{key}");
        remove_keys(value, &place, keys);
        keys.remove(&place);
    }
    run_file.as_array().into_iter().flatten().for_each(|value| remove_keys(value, place, keys));
}

/// Panics if the run files of a version leave out a key.
fn expect_all_keys(version: &Path) {
    let mut keys = BTreeSet::new();
    keys_of_schema(&schema(), "", &mut keys);
    assert!(keys.len() > 100, "{} keys were found", keys.len());
    let of_runs = trained(version).into_iter().map(|folder| folder.join("run.toml"));
    for file in run_files(version).into_iter().chain(of_runs) {
        let run_file: Value = toml::from_str(&text(&file)).unwrap();
        remove_keys(&run_file, "", &mut keys);
    }
    assert!(keys.is_empty(), "no run file in {} has {keys:?}", version.display());
}

#[test]
fn this_version_has_kept_its_files() {
    let version = versions().pop().unwrap();
    let (run_files, trained) = (run_files(&version), trained(&version));
    assert!(
        !run_files.is_empty() && !trained.is_empty(),
        "{}: copy the run files of the version before, and add its new keys to them",
        version.display()
    );
    if std::env::var_os("KEEP_VERSION").is_some() {
        expect_all_keys(&version);
        run_files.iter().for_each(|file| keep(&expectation(file), &resolved(file)));
        trained.iter().for_each(|folder| keep_trained(folder));
    }
    let expected = run_files.iter().map(|file| expectation(file));
    for file in expected.chain(trained.iter().map(|folder| folder.join("expected.json"))) {
        assert!(file.exists(), "{} is not there: KEEP_VERSION=1 cargo test", file.display());
    }
}
