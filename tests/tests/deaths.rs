//! A process that dies at any moment of a run: all others end and name it, and a run resumed from what is left on disk
//! gives the same bits as an undisturbed one.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use fsdp_ckpt::native::{NativeReader, RunDir};
use fsdp_nn::model::{Mlp, MlpConfig};
use fsdp_train::Job;
use fsdp_train::train::{Resume, train};
use serde_json::Value;
use tempfile::TempDir;

use crate::mortal::{Crew, Death, End, train_mortals};
use crate::resume::tensors;
use crate::support::{config, job_of, run_options, threads};

/// Enough for a save that overlaps a step, the removal of old checkpoints, and a last step.
const STEPS: u64 = 3;

/// The only names that a run leaves in its checkpoint folder.
const STEP_NAMES: [&str; STEPS as usize] = ["step-00000001", "step-00000002", "step-00000003"];

/// A run in which a process dies.
struct Case {
    crew: Crew,
    settings: &'static [&'static str],
    /// Steps of an earlier run, from whose checkpoint this one resumes; 0 if there is none.
    done: u64,
}

/// Everything that must be equal in two runs: loss, norm and rate of each step, tensors of the last checkpoint, model.
type Bits = (Vec<[Value; 4]>, BTreeMap<String, Vec<u8>>, Vec<u8>);

fn bits(out: &Path) -> Bits {
    let metrics = fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let steps = metrics.lines().filter_map(|line| step(&serde_json::from_str(line).unwrap())).collect();
    let last = tensors(&RunDir::new(out).checkpoint(STEPS));
    (steps, last, fs::read(out.join("model/model.safetensors")).unwrap())
}

/// What is the same in the metrics of equal steps; `None` for the line with its participants that each start writes.
fn step(line: &Value) -> Option<[Value; 4]> {
    line.get("step").map(|_| ["step", "loss", "grad_norm", "lr"].map(|key| line[key].clone()))
}

/// What is in the folder of a run.
type Content = BTreeMap<PathBuf, Vec<u8>>;

/// Collects all that is in a folder, except for the times in its metrics, in which equal runs differ.
fn collect(folder: &Path, content: &mut Content) {
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let path = entry.unwrap().path();
        let bytes = if path.is_dir() {
            collect(&path, content);
            Vec::new()
        } else if path.ends_with("metrics.jsonl") {
            let lines = fs::read_to_string(&path).unwrap();
            let steps = lines.lines().map(|line| serde_json::from_str(line).map(|line| step(&line)).ok());
            format!("{:?}", steps.collect::<Vec<_>>()).into_bytes()
        } else {
            fs::read(&path).unwrap()
        };
        content.insert(path, bytes);
    }
}

fn job(dir: &Path, out: &str, settings: &[&str], steps: u64) -> Job<Mlp> {
    let out = format!("run.out_dir={}", dir.join(out).display());
    let steps = format!("train.steps={steps}");
    let own = ["fsdp.wrap=[\"MlpLayer\"]", "checkpoint.every=1", &steps, &out];
    let sizes = MlpConfig { vocab: 7, widths: vec![3, 5, 4], bias: true, tied: false, std: 0.2 };
    job_of(Mlp::new(&sizes).unwrap(), config(dir, 7, &[&own, settings].concat()))
}

/// Trains with ranks as threads, from the newest checkpoint if there is one.
fn train_to_the_end(job: &Job<Mlp>, what: &str) {
    train(job, &threads(), &run_options(Resume::Newest)).unwrap_or_else(|error| panic!("{what}: {error}"));
}

/// The folders of a case.
struct Folders(TempDir);

impl Folders {
    fn new() -> Self {
        // In memory where possible: every death leaves several checkpoints.
        Self(tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap())
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join(name)
    }

    /// Copies the state of a folder at some moment; threads of a dead process may still write to it.
    fn copy(&self, from: &str, to: &str) {
        loop {
            let _ = fs::remove_dir_all(self.path(to));
            match copy(&self.path(from), &self.path(to)) {
                Ok(()) => return,
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::NotFound, "{error}"),
            }
        }
    }
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    if !from.exists() {
        return Ok(());
    }
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy(&path, &target)?;
        } else {
            fs::copy(&path, &target)?;
        }
    }
    Ok(())
}

impl Case {
    fn check(&self) {
        let folders = Folders::new();
        let job = |out, steps| job(folders.0.path(), out, self.settings, steps);
        train_to_the_end(&job("whole", STEPS), "the run that nothing happens to");
        let expected = bits(&folders.path("whole"));
        if self.done > 0 {
            train_to_the_end(&job("begun", self.done), "the earlier run");
        }
        folders.copy("begun", "run");
        let (run, left) = (job("run", STEPS), job("left", STEPS));
        let all = train_mortals(&run, self.crew, None, || ());
        assert!(all.results.iter().all(|(_, result)| result.is_ok()), "{:?}", all.results);
        assert!(bits(&folders.path("run")) == expected, "processes have the bits of threads");
        let mut seen = BTreeSet::new();
        for process in 0..all.moments.len() {
            let deaths = (0..).map(|moments| Death { process, moments });
            let count = deaths
                .take_while(|&death| self.survive(&folders, &run, &left, &expected, death, &mut seen))
                .count();
            // The number of moments differs a little from run to run, because of the order of threads.
            assert!(count as u64 + 20 > all.moments[process], "{count} of {}", all.moments[process]);
        }
    }

    /// Lets a process die and resumes from what is left, unless an earlier death has left the same. Returns false if the
    /// process ended before its death.
    fn survive(
        &self,
        folders: &Folders,
        run: &Job<Mlp>,
        left: &Job<Mlp>,
        expected: &Bits,
        death: Death,
        seen: &mut BTreeSet<Content>,
    ) -> bool {
        folders.copy("begun", "run");
        let end = train_mortals(run, self.crew, Some(death), || folders.copy("run", "left"));
        if !end.is_dead {
            return false;
        }
        if self.name_dead_rank(death, &end) {
            assert!(
                bits(&folders.path("left")) == *expected,
                "{death:?}: others have succeeded without result"
            );
        }
        let mut content = Content::new();
        collect(&folders.path("left"), &mut content);
        if !seen.insert(content) {
            return true;
        }
        if let Some((_, newest)) = RunDir::new(folders.path("left")).newest().unwrap() {
            NativeReader::open(newest).unwrap().verify().unwrap();
        }
        train_to_the_end(left, &format!("{death:?}"));
        assert!(bits(&folders.path("left")) == *expected, "{death:?}");
        let checkpoints = fs::read_dir(folders.path("left/checkpoints")).unwrap();
        let names = checkpoints.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let others: Vec<_> = names.filter(|name| !STEP_NAMES.contains(&name.as_str())).collect();
        assert!(others.is_empty(), "{death:?} leaves {others:?}");
        true
    }

    /// Checks that the errors of the others name a rank of the dead process. Returns whether all others succeeded,
    /// which is possible if only the end of the run was left to hear of.
    fn name_dead_rank(&self, death: Death, end: &End) -> bool {
        let held = self.crew.ranks_per_process;
        let ranks = death.process * held..(death.process + 1) * held;
        let errors: Vec<_> = end.results.iter().filter_map(|(_, result)| result.as_ref().err()).collect();
        for error in &errors {
            let text = error.to_string();
            let names = |rank| text.contains(&format!("rank {rank} failed: its process died"));
            assert!(ranks.clone().any(names), "{death:?}: {text}");
        }
        assert!(errors.is_empty() || errors.len() == end.results.len(), "{death:?}: {:?}", end.results);
        errors.is_empty()
    }
}

/// One rank per process; operations, assembly messages and reports are its moments.
const ONE_RANK: Crew = Crew { ranks_per_process: 1, counts_messages: false };

#[test]
fn death_of_either_of_two_processes_resumes_bitwise() {
    let crew = Crew { counts_messages: true, ..ONE_RANK };
    Case { crew, settings: &["run.ranks=2", "train.global_batch_size=4"], done: 0 }.check();
}

#[test]
fn death_of_any_offloading_process_resumes_bitwise() {
    let settings = &["run.ranks=3", "train.global_batch_size=6", "fsdp.offload=\"cpu\""];
    Case { crew: ONE_RANK, settings, done: 0 }.check();
}

#[test]
fn death_of_any_process_in_resumed_hsdp_run_resumes_bitwise() {
    let settings = &["run.ranks=4", "train.global_batch_size=8", "fsdp.mesh={ replicate = 2 }"];
    Case { crew: ONE_RANK, settings, done: 1 }.check();
}

#[test]
fn death_of_two_rank_process_with_sync_saves_resumes_bitwise() {
    let settings = &[
        "run.ranks=4",
        "train.global_batch_size=16",
        "train.grad_clip=0.05",
        "checkpoint.async=false",
        "fsdp.reshard_after_forward=false",
        "fsdp.accumulation=\"unsharded\"",
    ];
    Case { crew: Crew { ranks_per_process: 2, ..ONE_RANK }, settings, done: 0 }.check();
}
