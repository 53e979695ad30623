//! What is left of a run that could not begin.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fsdp_core::Error;
use fsdp_nn::model::{Mlp, MlpConfig};
use fsdp_nn::{HostMemory, HostOptions};
use fsdp_sim::{Threads, WorldOptions};

use super::*;
use crate::InitSource;
use crate::config::Resolved;

fn job(dir: &Path) -> Job<Mlp> {
    let data = dir.join("tokens.bin");
    std::fs::write(&data, (0..200u16).flat_map(|i| (i % 7).to_le_bytes()).collect::<Vec<u8>>()).unwrap();
    let text = format!(
        "model = {{ path = 'unused' }}\ndata = {{ train = ['{}'], format = 'tokens-u16', seq_len = 3 }}\n\
         train = {{ steps = 1, micro_batch_size = 1, global_batch_size = 2 }}\n\
         fsdp = {{ wrap = ['Linear'] }}\nrun = {{ ranks = 2, out_dir = '{}' }}",
        data.display(),
        dir.join("out").display()
    );
    let sizes = MlpConfig { vocab: 7, widths: vec![3], bias: true, tied: false, std: 0.2 };
    let model = Mlp::new(&sizes).unwrap();
    let init = InitSource::Random { seed: 0, init: Arc::new(model.description().init.clone()) };
    Job::new(Resolved::parse(&text, "test", &[]).unwrap().config, model, init).unwrap()
}

fn train_on(job: &Job<Mlp>, has_room: bool) -> Result<Summary, TrainError> {
    run(job, has_room, &Arc::new(AtomicBool::new(false)), false)
}

/// A run that `stop` is raised for when its ranks are set up, if it replaces an earlier one.
fn run(
    job: &Job<Mlp>,
    has_room: bool,
    stop: &Arc<AtomicBool>,
    overwrite: bool,
) -> Result<Summary, TrainError> {
    let raised = Arc::clone(stop);
    let launcher = Threads::new(WorldOptions::new(2), move |rank, _| match rank.0 {
        1 if !has_room => Err(Error::Memory { category: None, what: "no room".to_owned() }),
        _ => {
            raised.store(overwrite, Ordering::Relaxed);
            Ok(Arc::new(HostMemory::new(HostOptions::default())?))
        }
    });
    let options = RunOptions {
        reporter: &(),
        stop,
        resume: Resume::Fresh,
        overwrite,
        observer: &|_| Box::new(()),
        config_json: None,
        flops: None,
    };
    train(job, &launcher, &options)
}

#[test]
fn a_run_whose_ranks_were_not_set_up_can_be_tried_again() {
    let dir = tempfile::tempdir().unwrap();
    let job = job(dir.path());
    let error = train_on(&job, false).unwrap_err();
    assert!(matches!(error, TrainError::Setup { .. }) && !error.is_usage(), "{error}");
    train_on(&job, true).unwrap_or_else(|error| panic!("{error}"));
    let error = train_on(&job, true).unwrap_err();
    assert!(
        matches!(error, TrainError::OutDirNotEmpty { .. }),
        "what a run has made is not replaced: {error}"
    );
}

#[test]
fn a_run_that_is_stopped_before_it_starts_makes_no_folder() {
    let dir = tempfile::tempdir().unwrap();
    let job = job(dir.path());
    let error = run(&job, true, &Arc::new(AtomicBool::new(true)), false).unwrap_err();
    assert!(matches!(error, TrainError::Stopped), "{error}");
    assert!(!dir.path().join("out").exists());
}

#[test]
fn a_run_that_is_stopped_before_its_first_step_leaves_the_one_before_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let job = job(dir.path());
    train_on(&job, true).unwrap();
    let read = |name: &str| std::fs::read(dir.path().join("out").join(name)).unwrap();
    let names = ["metrics.jsonl", "resolved.toml", "model/model.safetensors"];
    let before = names.map(read);
    for _ in 0..3 {
        let error = run(&job, true, &Arc::new(AtomicBool::new(false)), true).unwrap_err();
        assert!(matches!(error, TrainError::Stopped) && !error.is_usage(), "{error}");
        assert_eq!(names.map(read), before);
    }
}
