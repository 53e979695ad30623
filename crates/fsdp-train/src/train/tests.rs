//! What is left of a run that could not begin.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

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
    let launcher = Threads::new(WorldOptions::new(2), move |rank, _| match rank.0 {
        1 if !has_room => Err(Error::Memory { category: None, what: "no room".to_owned() }),
        _ => Ok(Arc::new(HostMemory::new(HostOptions::default())?)),
    });
    let options = RunOptions {
        reporter: &(),
        stop: &AtomicBool::new(false),
        resume: Resume::Fresh,
        overwrite: false,
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
    assert!(matches!(error, TrainError::Setup { .. }), "{error}");
    train_on(&job, true).unwrap_or_else(|error| panic!("{error}"));
    let error = train_on(&job, true).unwrap_err();
    assert!(
        matches!(error, TrainError::OutDirNotEmpty { .. }),
        "what a run has made is not replaced: {error}"
    );
}
