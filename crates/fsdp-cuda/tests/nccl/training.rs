//! Whole runs of the trainer on CUDA memory and NCCL, over fakes of both: several processes produce the same model as
//! one, bit for bit.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use fsdp_core::Rank;
use fsdp_cuda::nccl::{GpuOptions, Gpus, Peers};
use fsdp_cuda::{CudaMemory, CudaOptions};
use fsdp_train::train::{Resume, RunOptions, train};

use crate::cuda::synchronize;
use crate::fake::Fake;
use crate::fake_cuda::{self, FakeDevice};
use crate::job::{GPT2, LLAMA, job};
use crate::mixed::Mixed;
use crate::processes::Processes;

/// Environment variables of a child process: the folder of the run, its model, its output folder, its world size, and that
/// of its context axis.
const DIR: &str = "FSDP_TEST_DIR";
const MODEL: &str = "FSDP_TEST_MODEL";
const OUT: &str = "FSDP_TEST_OUT";
const RANKS: &str = "FSDP_TEST_RANKS";
const CONTEXT: &str = "FSDP_TEST_CONTEXT";

/// Trains with the ranks of this process.
fn run(dir: &Path, model: &str, out: &Path, [ranks, context]: [usize; 2], peers: Option<Peers>) {
    let here = peers.as_ref().map_or(0..ranks, |peers| peers.assembly.local());
    let devices: Vec<FakeDevice> = here.clone().map(|_| fake_cuda::device()).collect();
    let count = devices.len();
    let memory = move |rank: Rank, _| {
        let options = CudaOptions { poison: true, ..CudaOptions::new(devices[rank.0 - here.start].ordinal) };
        Ok(Arc::new(Mixed::new(CudaMemory::new(options)?)))
    };
    let fake = Fake::beside_streams(synchronize());
    let gpus = Gpus::new(fake.nccl.clone(), GpuOptions::new(count), memory);
    let gpus = match peers {
        Some(peers) => gpus.among(peers),
        None => gpus,
    };
    let overrides = [
        format!("run.ranks={ranks}"),
        format!("run.out_dir='{}'", out.display()),
        "checkpoint.every=2".to_owned(),
        format!("fsdp.mesh.context={context}"),
        "data.seq_len=8".to_owned(),
    ];
    let job = job(dir, model, &overrides.each_ref().map(String::as_str));
    let options = RunOptions {
        reporter: &(),
        stop: &AtomicBool::new(false),
        resume: Resume::Fresh,
        overwrite: false,
        observer: &|_| Box::new(()),
        config_json: None,
        flops: None,
        process_table: None,
    };
    let summary = train(&job, &gpus, &options).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(summary.steps, 4);
    fake.assert_clean();
}

/// Runs the child process of a test.
pub(crate) fn in_processes(peers: Peers) {
    let variable = |name: &str| env::var(name).unwrap();
    let sizes = [RANKS, CONTEXT].map(|name| variable(name).parse().unwrap());
    run(Path::new(&variable(DIR)), &variable(MODEL), Path::new(&variable(OUT)), sizes, Some(peers));
}

/// Returns the data files of all ranks, of the checkpoint after the last step and of the model, by file name.
fn made(out: &Path) -> BTreeMap<OsString, Vec<u8>> {
    let files = ["checkpoints/step-00000004", "model"].map(|folder| fs::read_dir(out.join(folder)).unwrap());
    let files = files.into_iter().flatten().map(|file| file.unwrap().path());
    let is_data = |file: &PathBuf| file.extension().is_some_and(|kind| kind != "json");
    files
        .filter(is_data)
        .map(|file| (file.file_name().unwrap().to_owned(), fs::read(file).unwrap()))
        .collect()
}

#[test]
fn multi_process_outputs_match_single_process_bitwise() {
    for (model, processes, local_ranks, context) in
        [(LLAMA, 2, 1, 1), (LLAMA, 2, 2, 1), (LLAMA, 2, 2, 2), (GPT2, 4, 1, 1)]
    {
        let dir = tempfile::tempdir().unwrap();
        let (alone, out) = (dir.path().join("alone"), dir.path().join("several"));
        let ranks = processes * local_ranks;
        run(dir.path(), model, &alone, [ranks, context], None);
        let [folder, there] = [dir.path(), &out].map(|path| path.to_str().unwrap());
        let sizes = [ranks, context].map(|size| size.to_string());
        let variables =
            [(DIR, folder), (MODEL, model), (OUT, there), (RANKS, &sizes[0]), (CONTEXT, &sizes[1])];
        let ends = Processes::start_with("train", processes, local_ranks, 60, &variables).ends();
        assert!(ends.iter().all(|(is_well, _)| *is_well), "{processes} x {local_ranks}: {ends:#?}");
        let (expected, made) = (made(&alone), made(&out));
        assert!(expected.len() > ranks, "{:?}", expected.keys());
        assert_eq!(made.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
        assert!(made == expected, "{processes} x {local_ranks}, context {context}");
    }
}
