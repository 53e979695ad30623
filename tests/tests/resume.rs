//! A run that goes on from a checkpoint is the run that never stopped.
//!
//! Three runs: one from begin to end, one that ends after some steps and leaves a checkpoint, and one that
//! goes on from it, elsewhere and possibly on other ranks under other policies. What is compared is everything:
//! every tensor of the last checkpoint, and losses and norms of every step, by their bits.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use fsdp_ckpt::native::{NativeReader, RunDir};
use fsdp_core::FailureKind;
use fsdp_nn::hf::HfModel;
use fsdp_train::checkpoint::{Change, Resume, Resumed, Saved};
use fsdp_train::metrics::StepMetrics;
use fsdp_train::train::{Reporter, RunOptions, Summary, train};
use fsdp_train::{Job, TrainError};
use proptest::prelude::*;
use proptest::sample::select;

use crate::half_precision::OVERFLOWING;
use crate::support::{GPT2, LLAMA, config, job, options, threads_with};

/// What a run told while it went on.
#[derive(Debug, Default)]
struct Told {
    steps: Mutex<Vec<(u64, u64, u64)>>,
    resumed: Mutex<Vec<Option<Resumed>>>,
    saved: Mutex<Vec<u64>>,
    /// Asks to stop when this step is done.
    stop_after: Option<u64>,
    stop: AtomicBool,
}

impl Reporter for Told {
    fn step(&self, metrics: &StepMetrics) {
        let bits = (metrics.step, metrics.loss.to_bits(), metrics.grad_norm.to_bits());
        self.steps.lock().unwrap().push(bits);
        if self.stop_after == Some(metrics.step) {
            self.stop.store(true, Ordering::Relaxed);
        }
    }

    fn resumed(&self, resumed: Option<&Resumed>) {
        self.resumed.lock().unwrap().push(resumed.cloned());
    }

    fn saved(&self, saved: &Saved) {
        assert!(saved.path.is_dir(), "a checkpoint is told of when it is complete");
        self.saved.lock().unwrap().push(saved.step);
    }
}

/// Runs a job, going on from a checkpoint or not.
fn run(job: &Job<HfModel>, resume: Resume, told: &Told) -> Result<Summary, TrainError> {
    let options_of_run = RunOptions {
        reporter: told,
        stop: &told.stop,
        resume,
        overwrite: false,
        observer: &|_| Box::new(()),
        config_json: Some("{\"hidden_size\": 24}".into()),
        flops: None,
        census: None,
    };
    train(job, &threads_with(options()), &options_of_run)
}

/// Every tensor of a checkpoint, as bytes.
pub(crate) fn tensors(checkpoint: &Path) -> BTreeMap<String, Vec<u8>> {
    let reader = NativeReader::open(checkpoint).unwrap();
    let whole = |(name, tensor): (&String, &fsdp_ckpt::native::ManifestTensor)| {
        let rows = tensor.shape.first().copied().unwrap_or(1);
        let mut bytes = vec![0; tensor.shape.iter().product::<usize>() * tensor.dtype.size_bytes()];
        reader.read_rows(name, 0..rows, &mut bytes).unwrap();
        (name.clone(), bytes)
    };
    reader.manifest().tensors.iter().map(whole).collect()
}

/// A run, cut in two.
#[derive(Clone, Debug)]
struct Case {
    model: &'static str,
    /// Settings of both parts.
    settings: Vec<&'static str>,
    /// Of the first part only.
    before: Vec<&'static str>,
    /// Of the second part only.
    after: Vec<&'static str>,
    cut: u64,
    steps: u64,
    /// Whether the first part is stopped, rather than saving in passing.
    is_stopped: bool,
}

impl Case {
    fn job(&self, out: &Path, data: &Path, more: &[&str], every: u64) -> Job<HfModel> {
        let vocab = if self.model == LLAMA { 61 } else { 53 };
        let own = [
            format!("run.out_dir={}", out.display()),
            format!("train.steps={}", self.steps),
            format!("checkpoint.every={every}"),
            "checkpoint.keep_last=0".to_owned(),
        ];
        let own = own.iter().map(String::as_str);
        let overrides: Vec<&str> = self.settings.iter().chain(more).copied().chain(own).collect();
        job(self.model, config(data, vocab, &overrides))
    }

    fn check(&self) {
        let dir = tempfile::tempdir().unwrap();
        let out = |name: &str| dir.path().join(name);
        let whole = Told::default();
        run(&self.job(&out("whole"), dir.path(), &self.before, self.steps), Resume::Fresh, &whole).unwrap();

        let first = Told { stop_after: self.is_stopped.then_some(self.cut), ..Told::default() };
        // A stop is seen at the begin of the next step, which is still done.
        let every = if self.is_stopped { 0 } else { self.cut };
        let part =
            run(&self.job(&out("part"), dir.path(), &self.before, every), Resume::Fresh, &first).unwrap();
        let checkpoint = if self.is_stopped {
            assert_eq!(part.stopped, part.steps < self.steps);
            if !part.stopped {
                return;
            }
            RunDir::new(out("part")).newest().unwrap().unwrap().1
        } else {
            RunDir::new(out("part")).checkpoint(self.cut)
        };
        let done = NativeReader::open(&checkpoint).unwrap().manifest().run_state["step"].as_u64().unwrap();

        let second = Told::default();
        let resumed = self.job(&out("on"), dir.path(), &self.after, self.steps);
        let summary = run(&resumed, Resume::From { path: checkpoint, at_step: None }, &second).unwrap();
        assert_eq!((summary.resumed_from, summary.steps), (Some(done), self.steps));
        let expected: Vec<_> =
            whole.steps.lock().unwrap().iter().filter(|(step, ..)| *step > done).copied().collect();
        assert_eq!(*second.steps.lock().unwrap(), expected);
        let last = |name: &str| tensors(&RunDir::new(out(name)).checkpoint(self.steps));
        assert_eq!(last("on"), last("whole"));
        let scale = |name: &str| {
            let reader = NativeReader::open(RunDir::new(out(name)).checkpoint(self.steps)).unwrap();
            reader.manifest().run_state.get("loss_scale").cloned()
        };
        assert_eq!(scale("on"), scale("whole"));
        let weights = |name: &str| std::fs::read(out(name).join("model/model.safetensors")).unwrap();
        assert_eq!(weights("on"), weights("whole"));
    }
}

/// Stands for the class of a model's layers.
const WRAP_LAYERS: &str = "layers";

/// The setting that wraps the layers of a model, where it stands for that.
fn wrapping(model: &str, settings: Vec<&'static str>) -> Vec<&'static str> {
    let layers =
        if model == LLAMA { "fsdp.wrap=[\"LlamaDecoderLayer\"]" } else { "fsdp.wrap=[\"GPT2Block\"]" };
    settings.into_iter().map(|setting| if setting == WRAP_LAYERS { layers } else { setting }).collect()
}

/// Policies that do not change what is computed.
fn policies() -> impl Strategy<Value = Vec<&'static str>> {
    let world = select(vec![
        vec!["run.ranks=1"],
        vec!["run.ranks=2"],
        vec!["run.ranks=4"],
        vec!["run.ranks=4", "fsdp.mesh.replicate=2"],
        vec!["run.ranks=8"],
    ]);
    let wrap = select(vec!["fsdp.wrap=[]", WRAP_LAYERS]);
    let reshard = select(vec![
        "fsdp.reshard_after_forward=\"auto\"",
        "fsdp.reshard_after_forward=true",
        "fsdp.reshard_after_forward=false",
    ]);
    let rest = select(vec![
        "fsdp.forward_prefetch=0",
        "fsdp.accumulation=\"unsharded\"",
        "checkpoint.async=false",
        "fsdp.offload=\"cpu\"",
        "fsdp.activation_checkpointing=\"selective\"",
    ]);
    (world, wrap, reshard, rest)
        .prop_map(|(world, wrap, reshard, rest)| world.into_iter().chain([wrap, reshard, rest]).collect())
}

fn cases() -> impl Strategy<Value = Case> {
    let optimizer = select(vec![
        "train.optimizer={name='adamw', lr=3e-3}",
        "train.optimizer={name='sgd', lr=0.1, momentum=0.9, dampening=0.1}",
        "train.optimizer={name='sgd', lr=0.1}",
    ]);
    let dtype = select(vec![
        ["fsdp.param_dtype=f32", "fsdp.reduce_dtype=f32"],
        ["fsdp.param_dtype=bf16", "fsdp.reduce_dtype=f32"],
        ["fsdp.param_dtype=f16", "fsdp.reduce_dtype=f32"],
        ["fsdp.param_dtype=f64", "fsdp.reduce_dtype=f64"],
    ]);
    let schedule = select(vec![
        "train.lr_schedule={name='constant'}",
        "train.lr_schedule={name='linear', warmup_steps=1}",
    ]);
    let settings =
        (optimizer, dtype, schedule, any::<bool>()).prop_map(|(optimizer, dtype, schedule, shuffle)| {
            let shuffle = if shuffle { "data.shuffle=true" } else { "data.shuffle=false" };
            vec![optimizer, dtype[0], dtype[1], schedule, shuffle]
        });
    let model = select(vec![LLAMA, GPT2]);
    (model, settings, policies(), policies(), 1u64..8, 1u64..4, any::<bool>()).prop_map(
        |(model, settings, before, after, cut, more, is_stopped)| Case {
            model,
            settings,
            before: wrapping(model, before),
            after: wrapping(model, after),
            cut,
            steps: cut + more,
            is_stopped,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_run_that_goes_on_is_the_run_that_never_stopped(case in cases()) {
        case.check();
    }
}

/// Sums of Adafactor depend on the mesh, so the bits are those of the same mesh.
#[test]
fn adafactor_goes_on_with_its_factored_state() {
    let mesh = vec!["run.ranks=4"];
    Case {
        model: GPT2,
        settings: vec!["train.optimizer={name='adafactor', relative_step=false, lr=1e-2, beta1=0.9}"],
        before: mesh.clone(),
        after: mesh,
        cut: 2,
        steps: 4,
        is_stopped: false,
    }
    .check();
}

/// A scale that was not kept would be skipped down to again.
#[test]
fn a_run_in_f16_goes_on_with_its_loss_scale_on_any_ranks() {
    for after in [vec!["run.ranks=2"], vec!["run.ranks=4", "fsdp.offload=\"cpu\"", "checkpoint.async=false"]]
    {
        let case = Case {
            model: LLAMA,
            settings: vec!["fsdp.param_dtype=f16", "train.optimizer={name='adamw', lr=3e-3}", OVERFLOWING],
            before: vec!["run.ranks=4"],
            after,
            cut: 9,
            steps: 14,
            is_stopped: false,
        };
        case.check();
    }
}

/// A Llama whose matrices are large enough for moments of 8 bits: rows of a part of a block, and of more than one.
const WIDE: &str = r#"{
    "model_type": "llama", "vocab_size": 65, "hidden_size": 64, "intermediate_size": 300,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "initializer_range": 0.2, "tie_word_embeddings": false, "hidden_act": "silu"
}"#;

#[test]
fn moments_of_8_bits_go_on_on_any_ranks() {
    for after in [
        vec!["run.ranks=1"],
        vec!["run.ranks=2", "fsdp.offload=\"cpu\"", "checkpoint.async=false"],
        vec!["run.ranks=8", "fsdp.mesh.replicate=2"],
    ] {
        Case {
            model: WIDE,
            settings: vec!["train.optimizer={name='adamw8bit', lr=1e-2}"],
            before: vec!["run.ranks=4"],
            after,
            cut: 2,
            steps: 4,
            is_stopped: false,
        }
        .check();
    }
}

#[test]
fn momentum_goes_on_on_any_ranks() {
    for after in [
        vec!["run.ranks=1"],
        vec!["run.ranks=2", "fsdp.wrap=[]", "checkpoint.async=false"],
        vec!["run.ranks=8", "fsdp.mesh.replicate=2"],
    ] {
        Case {
            model: WIDE,
            settings: vec!["train.optimizer={name='muon', lr=1e-2, adamw_lr=1e-2}"],
            before: vec!["run.ranks=4"],
            after,
            cut: 2,
            steps: 4,
            is_stopped: false,
        }
        .check();
    }
}

/// A directory with a run of four steps that saved after each.
fn saved_run(dir: &Path, more: &[&str]) -> PathBuf {
    let out = dir.join("out");
    let overrides = [&["checkpoint.every=1", "checkpoint.keep_last=0"], more].concat();
    run(&job(LLAMA, config(dir, 61, &overrides)), Resume::Fresh, &Told::default()).unwrap();
    out
}

#[test]
fn going_on_extends_a_run_and_records_the_change() {
    let dir = tempfile::tempdir().unwrap();
    let out = saved_run(dir.path(), &[]);
    let told = Told::default();
    let longer = job(LLAMA, config(dir.path(), 61, &["checkpoint.every=2", "train.steps=6"]));
    let summary = run(&longer, Resume::Newest, &told).unwrap();
    assert_eq!((summary.resumed_from, summary.steps), (Some(4), 6));
    let change = Change { step: 4, key: "train.steps".into(), from: "4".into(), to: "6".into() };
    let resumed = told.resumed.lock().unwrap();
    assert_eq!(resumed[0].as_ref().unwrap().changes, [change]);
    assert_eq!(RunDir::new(&out).steps().unwrap(), [4, 6], "two are kept");
    let lines = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    // Six steps, and who took part in each of two starts.
    assert_eq!(lines.lines().count(), 8);
    let last = NativeReader::open(RunDir::new(&out).checkpoint(6)).unwrap();
    let changes = last.manifest().run_state["changes"].as_array().unwrap().len();
    assert_eq!(changes, 1, "the change travels with the run");
}

#[test]
fn going_back_needs_leave_to_remove_what_came_after() {
    let dir = tempfile::tempdir().unwrap();
    let out = saved_run(dir.path(), &[]);
    let again = job(LLAMA, config(dir.path(), 61, &["checkpoint.every=1", "checkpoint.keep_last=0"]));
    let older = RunDir::new(&out).checkpoint(2);
    let error =
        run(&again, Resume::From { path: older.clone(), at_step: None }, &Told::default()).unwrap_err();
    assert!(matches!(error, TrainError::NewerCheckpoints { step: 2, newest: 4, .. }), "{error}");
    assert_eq!(RunDir::new(&out).steps().unwrap(), [1, 2, 3, 4], "nothing was removed");
}

/// The checkpoint of the last step, of a run that was killed before it had exported its model.
#[test]
fn a_run_with_all_steps_done_still_exports_its_model() {
    let dir = tempfile::tempdir().unwrap();
    let out = saved_run(dir.path(), &[]);
    let model = out.join("model/model.safetensors");
    let expected = std::fs::read(&model).unwrap();
    std::fs::remove_file(&model).unwrap();
    let again = job(LLAMA, config(dir.path(), 61, &["checkpoint.every=1"]));
    let summary = run(&again, Resume::Newest, &Told::default()).unwrap();
    assert_eq!((summary.steps, summary.resumed_from, summary.stopped), (4, Some(4), false));
    assert_eq!(std::fs::read(&model).unwrap(), expected);
}

#[test]
fn a_run_can_not_go_on_to_an_earlier_step() {
    let dir = tempfile::tempdir().unwrap();
    saved_run(dir.path(), &[]);
    let shorter = job(LLAMA, config(dir.path(), 61, &["checkpoint.every=1", "train.steps=3"]));
    let error = run(&shorter, Resume::Newest, &Told::default()).unwrap_err();
    assert!(matches!(error, TrainError::NothingLeft { done: 4, steps: 3, .. }), "{error}");
    assert_eq!(error.kind(), FailureKind::Input);
}

/// Goes back to an older checkpoint with leave to remove later ones.
fn go_back(job: &Job<HfModel>, to: &Path) -> Result<Summary, TrainError> {
    let options_of_run = RunOptions {
        reporter: &(),
        stop: &AtomicBool::new(false),
        resume: Resume::From { path: to.to_owned(), at_step: None },
        overwrite: true,
        observer: &|_| Box::new(()),
        config_json: Some("{\"hidden_size\": 24}".into()),
        flops: None,
        census: None,
    };
    train(job, &threads_with(options()), &options_of_run)
}

#[test]
fn a_link_to_a_checkpoint_is_that_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let out = saved_run(dir.path(), &[]);
    let link = dir.path().join("latest");
    std::os::unix::fs::symlink(RunDir::new(&out).checkpoint(2), &link).unwrap();
    let again = job(LLAMA, config(dir.path(), 61, &["checkpoint.every=4", "checkpoint.keep_last=0"]));
    go_back(&again, &link).unwrap();
    assert_eq!(RunDir::new(&out).steps().unwrap(), [1, 2, 4]);
}

#[test]
fn a_damaged_checkpoint_costs_none_of_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let out = saved_run(dir.path(), &[]);
    let file = RunDir::new(&out).checkpoint(2).join("shard-00003-model-00001-of-00001.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let again = job(LLAMA, config(dir.path(), 61, &["checkpoint.every=4", "checkpoint.keep_last=0"]));
    let metrics = std::fs::read(out.join("metrics.jsonl")).unwrap();
    let error = go_back(&again, &RunDir::new(&out).checkpoint(2)).unwrap_err();
    assert!(error.to_string().contains("shard-00003"), "{error}");
    assert_eq!(RunDir::new(&out).steps().unwrap(), [1, 2, 3, 4], "nothing was removed");
    assert_eq!(std::fs::read(out.join("metrics.jsonl")).unwrap(), metrics);
}

#[test]
fn going_on_without_a_checkpoint_begins_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let told = Told::default();
    let fresh = job(LLAMA, config(dir.path(), 61, &[]));
    let summary = run(&fresh, Resume::Newest, &told).unwrap();
    assert_eq!((summary.resumed_from, summary.steps), (None, 4));
    assert_eq!(*told.resumed.lock().unwrap(), [None]);
}

#[test]
fn another_run_is_refused_with_all_differences() {
    let dir = tempfile::tempdir().unwrap();
    saved_run(dir.path(), &["train.steps=2"]);
    let other = job(LLAMA, config(dir.path(), 61, &["train.steps=4", "data.seq_len=6", "model.seed=3"]));
    let error = run(&other, Resume::Newest, &Told::default()).unwrap_err();
    let TrainError::OtherRun { differences, .. } = &error else { panic!("{error}") };
    let names: Vec<&str> = differences.iter().map(|difference| difference.what.as_str()).collect();
    assert_eq!(names, ["data.seq_len", "model.seed", "content of data.train"]);
    assert_eq!(error.kind(), FailureKind::Input);
}

#[test]
fn another_model_is_refused_with_its_tensors() {
    let dir = tempfile::tempdir().unwrap();
    saved_run(dir.path(), &["train.steps=2"]);
    let other = LLAMA.replace("\"num_hidden_layers\": 3", "\"num_hidden_layers\": 2");
    let other = job(&other, config(dir.path(), 61, &[]));
    let error = run(&other, Resume::Newest, &Told::default()).unwrap_err();
    assert!(error.to_string().contains("model.layers.2."), "{error}");
    assert_eq!(error.kind(), FailureKind::Input);
}

#[test]
fn a_damaged_checkpoint_is_refused_by_name_before_the_first_step() {
    let dir = tempfile::tempdir().unwrap();
    let out = saved_run(dir.path(), &["train.steps=2"]);
    let checkpoint = RunDir::new(&out).checkpoint(2);
    let file = checkpoint.join("shard-00002-model-00001-of-00001.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let told = Told::default();
    let error = run(&job(LLAMA, config(dir.path(), 61, &[])), Resume::Newest, &told).unwrap_err();
    assert!(error.to_string().contains("shard-00002"), "{error}");
    assert!(told.steps.lock().unwrap().is_empty());
}

#[test]
fn a_folder_in_use_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let lock = RunDir::new(dir.path().join("out")).lock().unwrap();
    let error = run(&job(LLAMA, config(dir.path(), 61, &[])), Resume::Fresh, &Told::default()).unwrap_err();
    assert!(error.to_string().contains("out"), "{error}");
    drop(lock);
    run(&job(LLAMA, config(dir.path(), 61, &[])), Resume::Fresh, &Told::default()).unwrap();
}

/// Puts something in the place of the checkpoint of step 2 when step 1 is done.
struct Squatter {
    out: PathBuf,
    steps: Mutex<u64>,
}

impl Reporter for Squatter {
    fn step(&self, metrics: &StepMetrics) {
        if metrics.step == 1 {
            std::fs::create_dir_all(RunDir::new(&self.out).checkpoint(2)).unwrap();
        }
        *self.steps.lock().unwrap() = metrics.step;
    }
}

#[test]
fn an_error_behind_the_steps_ends_the_run() {
    for mode in ["checkpoint.async=true", "checkpoint.async=false"] {
        let dir = tempfile::tempdir().unwrap();
        let squatter = Squatter { out: dir.path().join("out"), steps: Mutex::new(0) };
        let overrides = ["checkpoint.every=2", "train.steps=100000", mode];
        let options_of_run = RunOptions {
            reporter: &squatter,
            stop: &AtomicBool::new(false),
            resume: Resume::Fresh,
            overwrite: false,
            observer: &|_| Box::new(()),
            config_json: None,
            flops: None,
            census: None,
        };
        let job = job(LLAMA, config(dir.path(), 61, &overrides));
        let error = train(&job, &threads_with(options()), &options_of_run).unwrap_err();
        assert!(error.to_string().contains("step-00000002"), "{error}");
        assert!(*squatter.steps.lock().unwrap() < 100_000, "the run ends long before its last step");
    }
}
