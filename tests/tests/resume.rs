//! A run that resumes from a checkpoint equals the run that never stopped.
//!
//! Three runs: one from start to end, one that ends after some steps and leaves a checkpoint, and one that resumes
//! from it in another folder, possibly with other ranks and policies. Everything is compared by its bits: every tensor
//! of the last checkpoint, and losses and norms of every step.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use fsdp_ckpt::native::{NativeReader, RunDir};
use fsdp_nn::hf::HfModel;
use fsdp_train::checkpoint::Saved;
use fsdp_train::metrics::StepMetrics;
use fsdp_train::train::{Reporter, Resume, Resumed, RunOptions, Summary, train};
use fsdp_train::{Job, TrainError};
use proptest::prelude::*;
use proptest::sample::select;

use crate::support::{GPT2, LLAMA, config, job, run_options, threads};

/// A reporter that records the reports of a run.
#[derive(Debug, Default)]
pub(crate) struct RecordingReporter {
    pub(crate) steps: Mutex<Vec<(u64, u64, u64)>>,
    pub(crate) resumed: Mutex<Vec<Option<Resumed>>>,
    saved: Mutex<Vec<u64>>,
    /// Requests a stop after this step.
    stop_after: Option<u64>,
    stop: AtomicBool,
}

impl Reporter for RecordingReporter {
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

/// The `config.json` written next to exported weights.
pub(crate) const CONFIG_JSON: &str = "{\"hidden_size\": 24}";

/// Runs a job, from a checkpoint or from the start.
pub(crate) fn run(
    job: &Job<HfModel>,
    resume: Resume,
    reporter: &RecordingReporter,
) -> Result<Summary, TrainError> {
    let config_json = Some(CONFIG_JSON.into());
    let options = RunOptions { reporter, stop: &reporter.stop, config_json, ..run_options(resume) };
    train(job, &threads(), &options)
}

/// Reads every tensor of a checkpoint as bytes.
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

/// A run that is split in two.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) model: &'static str,
    /// Settings for both parts.
    pub(crate) settings: Vec<&'static str>,
    /// Settings for the first part only.
    pub(crate) before: Vec<&'static str>,
    /// Settings for the second part only.
    pub(crate) after: Vec<&'static str>,
    pub(crate) cut: u64,
    pub(crate) steps: u64,
    /// Whether the first part is stopped by request, rather than only saving a checkpoint at the cut.
    pub(crate) is_stopped: bool,
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

    pub(crate) fn check(&self) {
        let dir = tempfile::tempdir().unwrap();
        let out = |name: &str| dir.path().join(name);
        let whole = RecordingReporter::default();
        run(&self.job(&out("whole"), dir.path(), &self.before, self.steps), Resume::Fresh, &whole).unwrap();

        let first = RecordingReporter {
            stop_after: self.is_stopped.then_some(self.cut),
            ..RecordingReporter::default()
        };
        // A stop request is noticed at the start of the next step, which is still done.
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

        let second = RecordingReporter::default();
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

/// Placeholder for the setting that wraps a model's layers.
const WRAP_LAYERS: &str = "layers";

/// Replaces [`WRAP_LAYERS`] by the setting that wraps the layers of a model.
fn wrapping(model: &str, settings: Vec<&'static str>) -> Vec<&'static str> {
    let layers =
        if model == LLAMA { "fsdp.wrap=[\"LlamaDecoderLayer\"]" } else { "fsdp.wrap=[\"GPT2Block\"]" };
    settings.into_iter().map(|setting| if setting == WRAP_LAYERS { layers } else { setting }).collect()
}

/// Draws policies that do not change results.
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
    fn resumed_run_matches_uninterrupted_run(case in cases()) {
        case.check();
    }
}
