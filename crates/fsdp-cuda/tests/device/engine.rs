//! Whole runs on the fake driver: the engine's schedules with real streams and events, against the oracle.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use fsdp_comm::launch::{LaunchFailure, Launcher, Seat};
use fsdp_core::Memory;
use fsdp_core::engine::{Observer, ProgramOrder};
use fsdp_core::schedule::{OpId, OpKind};
use fsdp_cuda::{CudaMemory, CudaOptions};
use fsdp_sim::SeededOrder;
use fsdp_sim::{ThreadOptions, Threads};
use fsdp_train::verify::{VerifyOptions, verify};
use fsdp_train::{RankTrainer, TrainError};

use crate::fake_cuda::{self, FakeDevice};
use crate::job::{GPT2, LLAMA, job};
use crate::mixed::Mixed;
use crate::subject::cuda_on;

/// Launches ranks that share a device.
fn ranks(device: FakeDevice, share_unsharded: bool) -> Threads<Mixed> {
    let timeout = Duration::from_secs(600);
    let options = ThreadOptions { share_unsharded, timeout, ..ThreadOptions::default() };
    Threads::new(options, move |_, _| Ok(Arc::new(Mixed::new(cuda_on(device)))))
}

/// Checks that the engine on one, two and four ranks gives the bits of a plain trainer with unsharded parameters.
fn hold(model: &str, overrides: &[&str], seed: u64, share_unsharded: bool) {
    let dir = tempfile::tempdir().unwrap();
    let job = job(dir.path(), model, overrides);
    let options = VerifyOptions {
        order: &|rank| Box::new(SeededOrder::for_rank(seed, rank.0)),
        ..VerifyOptions::new(&[1, 2, 4], 2)
    };
    let launcher = ranks(fake_cuda::device().seed(seed), share_unsharded);
    let report = verify(&job, &launcher, &options).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    assert_eq!(report.worlds.len(), 3, "{:?}", report.skipped);
    for world in &report.worlds {
        assert!(world.failures.is_empty(), "{overrides:?}, seed {seed}: {:#?}", world.failures);
    }
}

#[test]
fn sharded_runs_match_oracle_bitwise() {
    hold(LLAMA, &[], 1, false);
    hold(LLAMA, &["fsdp.param_dtype=bf16", "fsdp.activation_checkpointing=full"], 2, true);
    hold(GPT2, &[], 3, false);
    hold(GPT2, &["fsdp.activation_checkpointing=selective"], 7, true);
    hold(LLAMA, &["fsdp.offload=cpu", "fsdp.param_dtype=bf16"], 4, false);
    let adafactor = "train.optimizer={name='adafactor', beta1=0.9}";
    hold(LLAMA, &[adafactor], 5, false);
    hold(LLAMA, &[adafactor, "fsdp.offload=cpu"], 6, false);
}

#[test]
fn no_allocations_after_first_step() {
    for rule in ["{name='adamw', lr=3e-3}", "{name='adafactor'}"] {
        assert_allocates_once(&["run.ranks=1", &format!("train.optimizer={rule}")]);
    }
}

fn assert_allocates_once(overrides: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let job = job(dir.path(), LLAMA, overrides);
    let device = fake_cuda::device();
    let allocations = || ["cuMemAlloc", "cuMemHostAlloc", "cuMemFree"].map(|call| device.calls(call));
    let launched = ranks(device, false).launch(1, &|seat: Seat<Mixed>| {
        let memory = Arc::clone(&seat.memory);
        let mut trainer = RankTrainer::new(&job, seat)?;
        trainer.step(0, false, &mut ProgramOrder, &mut ())?;
        let before = (allocations(), memory.usage().allocations);
        for step in 1..4 {
            trainer.step(step, false, &mut ProgramOrder, &mut ())?;
        }
        assert_eq!((allocations(), memory.usage().allocations), before, "{overrides:?}");
        Ok(())
    });
    launched.unwrap_or_else(|failure: LaunchFailure<TrainError>| panic!("{failure:?}"));
}

/// Checks a requirement for replaying a step unchanged, as in a CUDA graph. The words of a step alternate between two
/// buffers, so only every other step is the same.
#[test]
fn addresses_repeat_every_second_step() {
    let checkpointed = ["fsdp.param_dtype=bf16", "fsdp.activation_checkpointing=full"];
    for (model, overrides) in [(LLAMA, &[][..]), (GPT2, &[]), (LLAMA, &checkpointed)] {
        let dir = tempfile::tempdir().unwrap();
        let job = job(dir.path(), model, &[&["run.ranks=1", "train.steps=8"], overrides].concat());
        let device = fake_cuda::device();
        let launched = ranks(device, false).launch(1, &|seat: Seat<Mixed>| {
            let mut trainer = RankTrainer::new(&job, seat)?;
            let mut steps = Vec::new();
            for step in 0..8 {
                trainer.step(step, false, &mut ProgramOrder, &mut ())?;
                steps.push(device.addresses());
            }
            assert!(!steps.contains(&0));
            // Addresses settle in the first two steps.
            assert_eq!(steps[2..4], steps[4..6], "{overrides:?}");
            assert_eq!(steps[4..6], steps[6..8], "{overrides:?}");
            Ok(())
        });
        launched.unwrap_or_else(|failure: LaunchFailure<TrainError>| panic!("{failure:?}"));
    }
}

/// Records the operations during which the host waits for the device.
struct Waits {
    device: FakeDevice,
    /// Waits counted by the fake when the previous operation began or was issued.
    seen: usize,
    during: BTreeSet<&'static str>,
}

impl Waits {
    fn note(&mut self, what: &'static str) {
        let calls = ["cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"];
        let waits = calls.iter().map(|call| self.device.calls(call)).sum();
        if std::mem::replace(&mut self.seen, waits) != waits {
            self.during.insert(what);
        }
    }
}

impl Observer for Waits {
    fn begin(&mut self, _op: OpId, kind: &OpKind) {
        self.note(if matches!(kind, OpKind::BeginStep) { "report" } else { "hand over" });
    }

    fn issued(&mut self, _op: OpId, kind: &OpKind) {
        self.note(kind.name());
    }
}

/// Returns the operations of later steps during which the host waits, except blocks: the host runs many of their
/// operations here.
fn waits(overrides: &[&str]) -> Vec<&'static str> {
    let dir = tempfile::tempdir().unwrap();
    let job = job(dir.path(), LLAMA, &[&["run.ranks=1", "fsdp.param_dtype=bf16"], overrides].concat());
    let device = fake_cuda::device();
    let launcher = Threads::new(ThreadOptions::default(), move |_, _| {
        Ok(Arc::new(Mixed::new(CudaMemory::new(CudaOptions::new(device.ordinal))?)))
    });
    let launched = launcher.launch(1, &|seat: Seat<Mixed>| {
        let mut trainer = RankTrainer::new(&job, seat)?;
        trainer.step(0, false, &mut ProgramOrder, &mut ())?;
        let mut waits = Waits { device, seen: 0, during: BTreeSet::new() };
        for step in 1..3 {
            trainer.step(step, false, &mut ProgramOrder, &mut waits)?;
        }
        let blocks = ["report", "forward", "recompute", "backward", "forward-backward"];
        Ok(waits.during.into_iter().filter(|what| !blocks.contains(what)).collect())
    });
    let mut waits = launched.unwrap_or_else(|failure: LaunchFailure<TrainError>| panic!("{failure:?}"));
    waits.remove(0)
}

#[test]
fn host_waits_inside_step_only_when_offloading() {
    let rules = ["{name='adamw', lr=3e-3}", "{name='sgd', lr=3e-3, momentum=0.9}", "{name='adafactor'}"];
    for rule in rules {
        assert_eq!(waits(&[&format!("train.optimizer={rule}")]), [""; 0], "{rule}");
    }
    let offload = "fsdp.offload=cpu";
    assert_eq!(waits(&[offload]), ["update"]);
    assert_eq!(waits(&[offload, "train.optimizer={name='adafactor'}"]), ["statistics", "update"]);
}
