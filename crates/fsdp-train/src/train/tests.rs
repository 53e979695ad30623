//! The files left by a run that could not begin, or that was ended by a failure outside the computation.

#[cfg(feature = "object-store")]
mod in_store;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fsdp_ckpt::native::{NativeReader, RunDir};
use fsdp_config::Resolved;
use fsdp_core::Error;
use fsdp_core::engine::Observer;
use fsdp_core::program::BlockCall;
use fsdp_core::schedule::{OpId, OpKind};
use fsdp_nn::model::{Mlp, MlpConfig};
use fsdp_nn::{HostMemory, HostOptions};
use fsdp_sim::{ThreadOptions, Threads};

use super::*;
use crate::InitSource;
use crate::checkpoint::Saved;
use crate::metrics::{METRICS, StepMetrics};

fn job(dir: &Path, settings: &str) -> Job<Mlp> {
    let data = dir.join("tokens.bin");
    fs::write(&data, (0..200u16).flat_map(|i| (i % 7).to_le_bytes()).collect::<Vec<u8>>()).unwrap();
    let text = format!(
        "model = {{ path = 'unused' }}\ndata = {{ train = ['{}'], format = 'tokens-u16', seq_len = 3 }}\n\
         fsdp = {{ wrap = ['Linear'] }}\nrun = {{ ranks = 2, out_dir = '{}' }}\n{settings}",
        data.display(),
        dir.join("out").display()
    );
    let sizes = MlpConfig { vocab: 7, widths: vec![3], bias: true, tied: false, std: 0.2 };
    let model = Mlp::new(&sizes).unwrap();
    let init = InitSource::Random { seed: 0, init: Arc::new(model.description().init.clone()) };
    Job::new(Resolved::parse(&text, "test", &[]).unwrap().config, model, init).unwrap()
}

fn steps(count: u64) -> String {
    format!("train = {{ steps = {count}, micro_batch_size = 1, global_batch_size = 2 }}\n")
}

fn train_on(job: &Job<Mlp>, reporter: &dyn Reporter) -> Result<Summary, TrainError> {
    run(job, reporter, Resume::Fresh, &going_on(), Setup::Works)
}

/// A stop flag that is not raised.
fn going_on() -> Arc<AtomicBool> {
    Arc::new(AtomicBool::new(false))
}

/// Events during the setup of ranks.
#[derive(Clone, Copy, PartialEq)]
enum Setup {
    Works,
    /// Rank 1 has no memory.
    Fails,
    /// A stop is requested while the run is about to replace an earlier one.
    IsStopped,
}

fn run(
    job: &Job<Mlp>,
    reporter: &dyn Reporter,
    resume: Resume,
    stop: &Arc<AtomicBool>,
    setup: Setup,
) -> Result<Summary, TrainError> {
    run_observed(job, reporter, resume, stop, setup, &|_| Box::new(()))
}

fn run_observed(
    job: &Job<Mlp>,
    reporter: &dyn Reporter,
    resume: Resume,
    stop: &Arc<AtomicBool>,
    setup: Setup,
    observer: &(dyn Fn(fsdp_core::Rank) -> Box<dyn Observer> + Sync),
) -> Result<Summary, TrainError> {
    let raised = Arc::clone(stop);
    // With fewer cores than ranks, a rank that waits for others outside of collectives may keep them from running.
    let on_one_core = ThreadOptions { cores: 1, ..ThreadOptions::default() };
    let launcher = Threads::new(on_one_core, move |rank, _| match rank.0 {
        1 if setup == Setup::Fails => Err(Error::Device("no room".into())),
        _ => {
            raised.fetch_or(setup == Setup::IsStopped, Ordering::Relaxed);
            Ok(Arc::new(HostMemory::new(HostOptions::default())?))
        }
    });
    let options = RunOptions {
        reporter,
        stop,
        resume,
        overwrite: setup == Setup::IsStopped,
        observer,
        config_json: None,
        flops: None,
        process_table: None,
    };
    train(job, &launcher, &options)
}

/// Calls a function after a step, while all ranks are in the middle of the run.
struct After<F>(u64, F);

impl<F: Fn() + Sync> Reporter for After<F> {
    fn step(&self, metrics: &StepMetrics) {
        if metrics.step == self.0 {
            self.1();
        }
    }
}

/// The error and the ending of a run that was ended by a failure outside the computation.
fn ended(result: Result<Summary, TrainError>) -> (TrainError, Ending) {
    match result {
        Err(TrainError::Ended { source, ending }) => (*source, ending),
        other => panic!("{other:?}"),
    }
}

fn kept(ending: &Ending) -> &Path {
    match &ending.state {
        Ok(Kept::InOutDir(path) | Kept::Elsewhere(path)) => path,
        Err(failure) => panic!("{failure:?}"),
    }
}

/// Asserts that a checkpoint is complete and of this step.
fn check(path: &Path, step: u64) {
    let reader = NativeReader::open(path).unwrap();
    reader.verify().unwrap();
    assert_eq!(reader.manifest().run_state["step"], step);
}

#[test]
fn run_can_be_retried_after_failed_rank_setup() {
    let dir = tempfile::tempdir().unwrap();
    let job = job(dir.path(), &steps(1));
    let error = run(&job, &(), Resume::Fresh, &going_on(), Setup::Fails).unwrap_err();
    assert!(error.to_string().contains(" could not be set up: "), "{error}");
    train_on(&job, &()).unwrap_or_else(|error| panic!("{error}"));
    let error = train_on(&job, &()).unwrap_err();
    assert!(error.to_string().contains("out is not empty"), "what a run has made is not replaced: {error}");
}

#[test]
fn failed_export_keeps_checkpoint_and_names_resume_flag() {
    // Without and with a checkpoint due after the last step.
    for every in [100, 0] {
        for is_async in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let checkpoint = format!("checkpoint = {{ every = {every}, async = {is_async} }}\n");
            let job = job(dir.path(), &(steps(4) + &checkpoint));
            let remove = After(2, || fs::remove_dir_all(dir.path().join("out/model")).unwrap());
            let (source, ending) = ended(train_on(&job, &remove));
            assert!(matches!(source, TrainError::NotExported { .. }), "{source}");
            assert_eq!(ending.done, 4);
            check(kept(&ending), 4);
            assert!(ending.to_string().contains("--resume"), "{ending}");
            // The run behaves as the message says.
            let summary = run(&job, &(), Resume::Newest, &going_on(), Setup::Works).unwrap();
            assert_eq!((summary.steps, summary.resumed_from), (4, Some(4)));
            assert!(dir.path().join("out/model/model.safetensors").exists());
        }
    }
}

#[test]
fn save_failing_on_one_rank_is_retried_after_current_step() {
    for is_async in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = format!("checkpoint = {{ every = 3, async = {is_async} }}\n");
        let job = job(dir.path(), &(steps(1000) + &checkpoint));
        // The file already exists only for rank 1.
        let block = After(2, || {
            let checkpoints = dir.path().join("out/checkpoints");
            let mut names = fs::read_dir(&checkpoints).unwrap().map(|entry| entry.unwrap().file_name());
            let reserved =
                names.find_map(|name| name.to_str()?.strip_prefix("reserved-00002.").map(str::to_owned));
            let unfinished = checkpoints.join(format!("step-00000003.{}", reserved.unwrap()));
            fs::create_dir_all(unfinished.join("shard-00002-model-00001-of-00001.safetensors")).unwrap();
        });
        let begin = Instant::now();
        let (source, ending) = ended(train_on(&job, &block));
        assert!(begin.elapsed() < Duration::from_secs(300), "nobody waits for run.timeout_s");
        let text = source.to_string();
        assert!(
            text.starts_with("the checkpoint after step 3 could not be saved: rank 1 failed: "),
            "{text}"
        );
        assert!((4..1000).contains(&ending.done), "all stop soon: {}", ending.done);
        check(kept(&ending), ending.done);
        assert_eq!(RunDir::new(dir.path().join("out")).newest().unwrap().unwrap().0, ending.done);
    }
}

#[test]
fn unwritable_output_folder_saves_state_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    let job = job(dir.path(), &(steps(5) + "checkpoint = { every = 2 }\n"));
    let checkpoints = dir.path().join("out/checkpoints");
    let block = After(1, || {
        fs::remove_dir_all(&checkpoints).unwrap();
        fs::write(&checkpoints, "in the way").unwrap();
    });
    let (source, ending) = ended(train_on(&job, &block));
    assert!(source.to_string().contains("step 2 could not be saved"), "{source}");
    let Ok(Kept::Elsewhere(path)) = &ending.state else { panic!("{ending}") };
    check(path, ending.done);
    assert!(ending.to_string().contains("--resume-from"), "{ending}");
    // The model is exported nevertheless.
    assert!(dir.path().join("out/model/model.safetensors").exists());
    fs::remove_dir_all(path.parent().unwrap().parent().unwrap()).unwrap();
}

#[test]
fn old_checkpoint_is_kept_until_newer_weights_gave_loss() {
    let dir = tempfile::tempdir().unwrap();
    let job = job(dir.path(), &(steps(6) + "checkpoint = { every = 2, keep_last = 1, async = false }\n"));
    let run = RunDir::new(dir.path().join("out"));
    let seen = std::sync::Mutex::new(Vec::new());
    struct Look<'a>(&'a RunDir, &'a std::sync::Mutex<Vec<Vec<u64>>>);
    impl Reporter for Look<'_> {
        fn saved(&self, _saved: &Saved) {
            self.1.lock().unwrap().push(self.0.steps().unwrap());
        }
    }
    train_on(&job, &Look(&run, &seen)).unwrap();
    assert_eq!(*seen.lock().unwrap(), [vec![2], vec![2, 4], vec![4, 6]]);
    assert_eq!(
        run.steps().unwrap(),
        [4, 6],
        "without an evaluation nothing shows what the last weights are worth"
    );
    let left: Vec<_> = fs::read_dir(run.checkpoints()).unwrap().collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

#[test]
fn disk_space_for_first_save_is_reserved_from_start() {
    let dir = tempfile::tempdir().unwrap();
    let job = job(dir.path(), &(steps(5) + "checkpoint = { every = 2, keep_last = 1, async = false }\n"));
    let checkpoints = dir.path().join("out/checkpoints");
    let seen = std::sync::Mutex::new(Vec::new());
    struct Count<'a>(&'a Path, &'a std::sync::Mutex<Vec<usize>>);
    impl Reporter for Count<'_> {
        fn step(&self, _metrics: &StepMetrics) {
            let names = fs::read_dir(self.0).unwrap().map(|entry| entry.unwrap().file_name());
            let reserved = names.filter(|name| name.to_string_lossy().starts_with("reserved-"));
            self.1.lock().unwrap().push(reserved.count());
        }
    }
    train_on(&job, &Count(&checkpoints, &seen)).unwrap();
    assert_eq!(seen.lock().unwrap()[..2], [2, 2], "one file for each rank, until the first save takes them");
}

#[test]
fn run_stopped_before_start_creates_no_folder() {
    let dir = tempfile::tempdir().unwrap();
    let job = job(dir.path(), &steps(1));
    let error = run(&job, &(), Resume::Fresh, &Arc::new(AtomicBool::new(true)), Setup::Works).unwrap_err();
    assert!(matches!(error, TrainError::Stopped), "{error}");
    assert!(!dir.path().join("out").exists());
}

#[test]
fn run_stopped_before_first_step_preserves_previous_run() {
    let dir = tempfile::tempdir().unwrap();
    let job = job(dir.path(), &steps(1));
    train_on(&job, &()).unwrap();
    let read = |name: &str| std::fs::read(dir.path().join("out").join(name)).unwrap();
    let names = ["metrics.jsonl", "resolved.toml", "model/model.safetensors"];
    let before = names.map(read);
    for _ in 0..3 {
        let error = run(&job, &(), Resume::Fresh, &going_on(), Setup::IsStopped).unwrap_err();
        assert!(matches!(error, TrainError::Stopped), "{error}");
        assert_eq!(names.map(read), before);
    }
}

#[test]
fn metrics_name_slow_rank() {
    /// Delays computing operations on one rank.
    struct Slow(bool);
    impl Observer for Slow {
        fn begin(&mut self, _op: OpId, kind: &OpKind) {
            if self.0 && matches!(kind, OpKind::Call(BlockCall::Forward(..))) {
                std::thread::sleep(Duration::from_millis(200));
            }
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let job = job(dir.path(), &steps(5));
    let observer = |rank: fsdp_core::Rank| -> Box<dyn Observer> { Box::new(Slow(rank.0 == 1)) };
    run_observed(&job, &(), Resume::Fresh, &going_on(), Setup::Works, &observer).unwrap();
    let text = fs::read_to_string(dir.path().join("out").join(METRICS)).unwrap();
    let named: Vec<u64> = text
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .filter_map(|line| line["slowest_rank"].as_u64())
        .collect();
    // The other rank may occasionally have to wait for a core of this machine.
    assert!(named.iter().filter(|&&rank| rank == 1).count() >= 3, "{named:?}");
}

#[test]
fn metrics_record_processes_at_every_start_and_wait_times() {
    let dir = tempfile::tempdir().unwrap();
    let saving = "checkpoint = { every = 2 }\n";
    train_on(&job(dir.path(), &format!("{saving}{}", steps(4))), &()).unwrap();
    let longer = job(dir.path(), &format!("{saving}{}", steps(6)));
    run(&longer, &(), Resume::Newest, &going_on(), Setup::Works).unwrap();
    let text = fs::read_to_string(dir.path().join("out").join(METRICS)).unwrap();
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let steps: Vec<Option<u64>> = lines.iter().map(|line| line["step"].as_u64()).collect();
    assert_eq!(steps, [None, Some(1), Some(2), Some(3), Some(4), None, Some(5), Some(6)]);
    for (line, after) in [(&lines[0], 0), (&lines[5], 4)] {
        let start = &line["start"];
        assert_eq!((&start["after_step"], &start["ranks"]), (&after.into(), &2.into()), "{start}");
        assert_eq!(
            (&start["transport"], &start["processes"][0]["device"]),
            (&"threads".into(), &"cpu".into())
        );
    }
    for line in lines.iter().filter(|line| line["step"].is_u64()) {
        let step = line["step"].as_u64().unwrap();
        // The waiting times are of the previous step; the first step after a start has none.
        let expected = if [1, 5].contains(&step) { None } else { Some(step - 1) };
        assert_eq!(line["wait_step"].as_u64(), expected, "{line}");
        if expected.is_some() {
            let [min, mean, max] =
                ["wait_ms_min", "wait_ms", "wait_ms_max"].map(|key| line[key].as_f64().unwrap());
            assert!(0.0 <= min && min <= mean && mean <= max, "{line}");
            assert!(line["slowest_rank"].as_u64().unwrap() < 2, "{line}");
        }
    }
}
