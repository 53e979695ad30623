//! What a run may do in a folder with checkpoints: resume, go back, or be refused with a specific error.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use fsdp_ckpt::native::{NativeReader, RunDir};
use fsdp_core::FailureKind;
use fsdp_nn::hf::HfModel;
use fsdp_train::checkpoint::Change;
use fsdp_train::metrics::StepMetrics;
use fsdp_train::train::{Reporter, Resume, RunOptions, Summary, train};
use fsdp_train::{Job, TrainError};

use crate::resume::{CONFIG_JSON, RecordingReporter, run};
use crate::support::{LLAMA, config, job, run_options, threads};

/// Trains a run of four steps that saves after each, and returns its folder.
fn saved_run(dir: &Path, more: &[&str]) -> PathBuf {
    let out = dir.join("out");
    let overrides = [&["checkpoint.every=1", "checkpoint.keep_last=0"], more].concat();
    run(&job(LLAMA, config(dir, 61, &overrides)), Resume::Fresh, &RecordingReporter::default()).unwrap();
    out
}

#[test]
fn resume_extends_run_and_records_change() {
    let dir = tempfile::tempdir().unwrap();
    let out = saved_run(dir.path(), &[]);
    let reporter = RecordingReporter::default();
    let longer = job(LLAMA, config(dir.path(), 61, &["checkpoint.every=2", "train.steps=6"]));
    let summary = run(&longer, Resume::Newest, &reporter).unwrap();
    assert_eq!((summary.resumed_from, summary.steps), (Some(4), 6));
    let change = Change { step: 4, key: "train.steps".into(), from: "4".into(), to: "6".into() };
    let resumed = reporter.resumed.lock().unwrap();
    assert_eq!(resumed[0].as_ref().unwrap().changes, [change]);
    assert_eq!(RunDir::new(&out).steps().unwrap(), [4, 6], "two are kept");
    let lines = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    // Six steps, and the participants of each of two starts.
    assert_eq!(lines.lines().count(), 8);
    let last = NativeReader::open(RunDir::new(&out).checkpoint(6)).unwrap();
    let changes = last.manifest().run_state["changes"].as_array().unwrap().len();
    assert_eq!(changes, 1, "the change travels with the run");
}

#[test]
fn resume_from_older_checkpoint_requires_overwrite() {
    let dir = tempfile::tempdir().unwrap();
    let out = saved_run(dir.path(), &[]);
    let again = job(LLAMA, config(dir.path(), 61, &["checkpoint.every=1", "checkpoint.keep_last=0"]));
    let older = RunDir::new(&out).checkpoint(2);
    let error =
        run(&again, Resume::From { path: older.clone(), at_step: None }, &RecordingReporter::default())
            .unwrap_err();
    assert!(error.to_string().contains("holds checkpoints after step 2, up to step 4"), "{error}");
    assert_eq!(RunDir::new(&out).steps().unwrap(), [1, 2, 3, 4], "nothing was removed");
}

/// Simulates a run that was killed between its last checkpoint and the export of its model.
#[test]
fn resume_of_finished_run_exports_model() {
    let dir = tempfile::tempdir().unwrap();
    let out = saved_run(dir.path(), &[]);
    let model = out.join("model/model.safetensors");
    let expected = std::fs::read(&model).unwrap();
    std::fs::remove_file(&model).unwrap();
    let again = job(LLAMA, config(dir.path(), 61, &["checkpoint.every=1"]));
    let summary = run(&again, Resume::Newest, &RecordingReporter::default()).unwrap();
    assert_eq!((summary.steps, summary.resumed_from, summary.stopped), (4, Some(4), false));
    assert_eq!(std::fs::read(&model).unwrap(), expected);
}

#[test]
fn resume_to_earlier_step_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    saved_run(dir.path(), &[]);
    let shorter = job(LLAMA, config(dir.path(), 61, &["checkpoint.every=1", "train.steps=3"]));
    let error = run(&shorter, Resume::Newest, &RecordingReporter::default()).unwrap_err();
    assert!(error.to_string().contains("has done 4 steps, and train.steps is 3"), "{error}");
    assert_eq!(error.kind(), FailureKind::Input);
}

/// Resumes from an older checkpoint with permission to remove later ones.
fn go_back(job: &Job<HfModel>, to: &Path) -> Result<Summary, TrainError> {
    let resume = Resume::From { path: to.to_owned(), at_step: None };
    let config_json = Some(CONFIG_JSON.into());
    train(job, &threads(), &RunOptions { overwrite: true, config_json, ..run_options(resume) })
}

#[test]
fn resume_follows_checkpoint_symlink() {
    let dir = tempfile::tempdir().unwrap();
    let out = saved_run(dir.path(), &[]);
    let link = dir.path().join("latest");
    std::os::unix::fs::symlink(RunDir::new(&out).checkpoint(2), &link).unwrap();
    let again = job(LLAMA, config(dir.path(), 61, &["checkpoint.every=4", "checkpoint.keep_last=0"]));
    go_back(&again, &link).unwrap();
    assert_eq!(RunDir::new(&out).steps().unwrap(), [1, 2, 4]);
}

#[test]
fn resume_from_damaged_checkpoint_removes_nothing() {
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
fn resume_without_checkpoint_starts_fresh() {
    let dir = tempfile::tempdir().unwrap();
    let reporter = RecordingReporter::default();
    let fresh = job(LLAMA, config(dir.path(), 61, &[]));
    let summary = run(&fresh, Resume::Newest, &reporter).unwrap();
    assert_eq!((summary.resumed_from, summary.steps), (None, 4));
    assert_eq!(*reporter.resumed.lock().unwrap(), [None]);
}

#[test]
fn resume_of_different_run_lists_all_differences() {
    let dir = tempfile::tempdir().unwrap();
    saved_run(dir.path(), &["train.steps=2"]);
    let other = job(LLAMA, config(dir.path(), 61, &["train.steps=4", "data.seq_len=6", "model.seed=3"]));
    let error = run(&other, Resume::Newest, &RecordingReporter::default()).unwrap_err();
    let text = error.to_string();
    let differences = text.split_once(": ").unwrap().1.split("; ");
    let names: Vec<&str> = differences.map(|difference| difference.split_once(" was ").unwrap().0).collect();
    assert_eq!(names, ["data.seq_len", "model.seed", "content of data.train"]);
    assert_eq!(error.kind(), FailureKind::Input);
}

#[test]
fn resume_with_different_model_names_tensors() {
    let dir = tempfile::tempdir().unwrap();
    saved_run(dir.path(), &["train.steps=2"]);
    let other = LLAMA.replace("\"num_hidden_layers\": 3", "\"num_hidden_layers\": 2");
    let other = job(&other, config(dir.path(), 61, &[]));
    let error = run(&other, Resume::Newest, &RecordingReporter::default()).unwrap_err();
    assert!(error.to_string().contains("model.layers.2."), "{error}");
    assert_eq!(error.kind(), FailureKind::Input);
}

#[test]
fn damaged_checkpoint_is_rejected_before_first_step() {
    let dir = tempfile::tempdir().unwrap();
    let out = saved_run(dir.path(), &["train.steps=2"]);
    let checkpoint = RunDir::new(&out).checkpoint(2);
    let file = checkpoint.join("shard-00002-model-00001-of-00001.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let reporter = RecordingReporter::default();
    let error = run(&job(LLAMA, config(dir.path(), 61, &[])), Resume::Newest, &reporter).unwrap_err();
    assert!(error.to_string().contains("shard-00002"), "{error}");
    assert!(reporter.steps.lock().unwrap().is_empty());
}

#[test]
fn locked_run_folder_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let lock = RunDir::new(dir.path().join("out")).lock().unwrap();
    let error = run(&job(LLAMA, config(dir.path(), 61, &[])), Resume::Fresh, &RecordingReporter::default())
        .unwrap_err();
    assert!(error.to_string().contains("out"), "{error}");
    drop(lock);
    run(&job(LLAMA, config(dir.path(), 61, &[])), Resume::Fresh, &RecordingReporter::default()).unwrap();
}

/// Occupies the path of the checkpoint of step 2 when step 1 is done.
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
fn checkpoint_save_error_ends_run() {
    for mode in ["checkpoint.async=true", "checkpoint.async=false"] {
        let dir = tempfile::tempdir().unwrap();
        let squatter = Squatter { out: dir.path().join("out"), steps: Mutex::new(0) };
        let overrides = ["checkpoint.every=2", "train.steps=100000", mode];
        let options = RunOptions { reporter: &squatter, ..run_options(Resume::Fresh) };
        let job = job(LLAMA, config(dir.path(), 61, &overrides));
        let error = train(&job, &threads(), &options).unwrap_err();
        assert!(error.to_string().contains("step-00000002"), "{error}");
        assert!(*squatter.steps.lock().unwrap() < 100_000, "the run ends long before its last step");
    }
}
