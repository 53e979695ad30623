//! Runs whose output folder is in an object store.

use std::path::PathBuf;

use fsdp_ckpt::objects;
use fsdp_core::DType;

use super::*;

const SAVES: &str = "checkpoint = { every = 2, async = false }\n";

/// Creates a job with another output folder.
fn job_in(dir: &Path, out_dir: &str, settings: &str) -> Job<Mlp> {
    let mut job = job(dir, settings);
    out_dir.clone_into(&mut job.config.run.out_dir);
    job
}

/// Requests a stop after a step.
struct StopAfter(u64, AtomicBool);

impl Reporter for StopAfter {
    fn step(&self, metrics: &StepMetrics) {
        self.1.fetch_or(metrics.step == self.0, Ordering::Relaxed);
    }
}

/// Trains until the step after `last`, or to the end.
fn go(job: &Job<Mlp>, resume: Resume, overwrite: bool, last: u64) -> Result<Summary, TrainError> {
    let reporter = StopAfter(last, AtomicBool::new(false));
    let launcher =
        Threads::new(ThreadOptions::default(), |_, _| Ok(Arc::new(HostMemory::new(HostOptions::default())?)));
    let options = RunOptions {
        reporter: &reporter,
        stop: &reporter.1,
        resume,
        overwrite,
        observer: &|_| Box::new(()),
        config_json: Some("{}".to_owned()),
        flops: None,
        process_table: None,
    };
    train(job, &launcher, &options)
}

/// All bytes of all tensors of a checkpoint.
fn tensors(checkpoint: &Path) -> Vec<(String, Vec<u8>)> {
    let reader = NativeReader::open(checkpoint).unwrap();
    reader.verify().unwrap();
    let of = |name: &String| {
        let tensor = &reader.manifest().tensors[name];
        let mut bytes = vec![0; tensor.row_count() * tensor.row_bytes() as usize];
        reader.read_rows(name, 0..tensor.row_count(), &mut bytes).unwrap();
        (name.clone(), bytes)
    };
    reader.manifest().tensors.keys().map(of).collect()
}

/// The step and loss of each line of the metrics.
fn losses(metrics: &[u8]) -> Vec<(u64, u64)> {
    let lines = std::str::from_utf8(metrics).unwrap().lines();
    let values = lines.map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let steps = values.filter(|value| value.get("loss").is_some());
    steps.map(|value| (value["step"].as_u64().unwrap(), value["loss"].as_f64().unwrap().to_bits())).collect()
}

#[test]
fn resumed_run_in_store_matches_run_on_disk_bitwise() {
    let dir = tempfile::tempdir().unwrap();
    let settings = steps(6) + SAVES;
    let disk = job(dir.path(), &settings);
    go(&disk, Resume::Fresh, false, u64::MAX).unwrap();
    let url = "memory://train/stopped";
    let stored = job_in(dir.path(), url, &settings);
    let cut = go(&stored, Resume::Fresh, false, 3).unwrap();
    assert!(cut.stopped && cut.steps < 6, "{cut:?}");
    let partial = objects::read(&Path::new(url).join("model/model.safetensors")).unwrap();
    let resumed = go(&stored, Resume::Newest, false, u64::MAX).unwrap();
    assert_eq!((resumed.steps, resumed.resumed_from), (6, Some(cut.steps)));

    let out = dir.path().join("out");
    let [on_disk, in_store] = [RunDir::new(&out), RunDir::new(url)];
    assert!(in_store.steps().unwrap().ends_with(&[4, 6]));
    for step in [4, 6] {
        assert_eq!(tensors(&in_store.checkpoint(step)), tensors(&on_disk.checkpoint(step)));
    }
    let object = |name: &str| objects::read(&Path::new(url).join(name)).unwrap();
    let model = object("model/model.safetensors");
    assert_eq!(model, fs::read(out.join("model/model.safetensors")).ok());
    assert_ne!(model, partial, "the model of the end replaced that of the stop");
    assert_eq!(object("model/config.json").as_deref(), Some(&b"{}"[..]));
    let metrics = object("metrics.jsonl").unwrap();
    assert_eq!(losses(&metrics), losses(&fs::read(out.join("metrics.jsonl")).unwrap()));
    assert_eq!(losses(&metrics).len(), 6);
    let names = objects::names(Path::new(url)).unwrap();
    assert_eq!(names, ["checkpoints", "metrics.jsonl", "model", "resolved.toml"]);
}

#[test]
fn export_to_store_has_same_bytes_as_to_disk() {
    let dir = tempfile::tempdir().unwrap();
    let sizes = MlpConfig { vocab: 7, widths: vec![3; 11], bias: true, tied: false, std: 0.2 };
    let dtypes = [None, Some(DType::F32), Some(DType::Bf16), Some(DType::F16), Some(DType::F64)];
    for (index, dtype) in dtypes.into_iter().enumerate() {
        let export = |out_dir: &str| {
            let mut job = job_in(dir.path(), out_dir, &(steps(2) + SAVES));
            job.config.run.export_dtype = dtype;
            let model = Mlp::new(&sizes).unwrap();
            let init = InitSource::Random { seed: 0, init: Arc::new(model.description().init.clone()) };
            go(&Job::new(job.config, model, init).unwrap(), Resume::Fresh, false, u64::MAX).unwrap();
        };
        let disk = dir.path().join(format!("disk-{index}"));
        export(disk.to_str().unwrap());
        let on_disk = fs::read(disk.join("model/model.safetensors")).unwrap();
        for url in [format!("memory://train/export-{index}"), format!("file://{}-store", disk.display())] {
            export(&url);
            let model = objects::read(&Path::new(&url).join("model/model.safetensors")).unwrap();
            assert!(model.as_ref() == Some(&on_disk), "{url} {dtype:?}");
        }
    }
}

#[test]
fn run_resumes_from_checkpoint_url_in_store() {
    let dir = tempfile::tempdir().unwrap();
    let settings = steps(4) + SAVES;
    let url = "memory://train/source";
    go(&job_in(dir.path(), url, &settings), Resume::Fresh, false, u64::MAX).unwrap();
    let from = |path: PathBuf| {
        go(&job(dir.path(), &settings), Resume::From { path, at_step: None }, false, u64::MAX)
    };
    let second = RunDir::new(url).checkpoint(2);
    let summary = from(second).unwrap();
    assert_eq!((summary.steps, summary.resumed_from), (4, Some(2)));
    let on_disk = RunDir::new(dir.path().join("out")).checkpoint(4);
    assert_eq!(tensors(&on_disk), tensors(&RunDir::new(url).checkpoint(4)));
    let error = from(RunDir::new(url).checkpoint(3)).unwrap_err().to_string();
    assert!(error.contains("memory://train/source/checkpoints/step-00000003"), "{error}");
    assert!(error.contains("no object has this name"), "{error}");
}

#[test]
fn store_content_is_replaced_only_with_overwrite() {
    let dir = tempfile::tempdir().unwrap();
    let url = "memory://train/twice";
    let first = job_in(dir.path(), url, &(steps(6) + SAVES));
    go(&first, Resume::Fresh, false, u64::MAX).unwrap();
    let second = job_in(dir.path(), url, &(steps(3) + SAVES));
    let error = go(&second, Resume::Fresh, false, u64::MAX).unwrap_err();
    assert!(error.to_string().contains("memory://train/twice is not empty"), "{error}");
    assert_eq!(RunDir::new(url).steps().unwrap(), [4, 6], "two are kept");
    go(&second, Resume::Fresh, true, u64::MAX).unwrap();
    assert_eq!(RunDir::new(url).steps().unwrap(), [2, 3]);
    let metrics = objects::read(&Path::new(url).join("metrics.jsonl")).unwrap().unwrap();
    assert_eq!(losses(&metrics).len(), 3);
}

#[test]
fn run_without_checkpoints_saves_final_state_in_store() {
    let dir = tempfile::tempdir().unwrap();
    let url = "memory://train/unsaved";
    let settings = steps(3) + "checkpoint = { every = 0 }\n";
    go(&job_in(dir.path(), url, &settings), Resume::Fresh, false, u64::MAX).unwrap();
    assert_eq!(RunDir::new(url).steps().unwrap(), [3]);
    go(&job(dir.path(), &settings), Resume::Fresh, false, u64::MAX).unwrap();
    let model = objects::read(&Path::new(url).join("model/model.safetensors")).unwrap();
    assert_eq!(model, fs::read(dir.path().join("out/model/model.safetensors")).ok());
}
