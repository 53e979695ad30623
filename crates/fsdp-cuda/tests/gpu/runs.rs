//! Whole runs of several ranks on one GPU: checks results against the oracle, memory against the ledger's predictions,
//! and that a step whose loss is not finite changes no state.

use std::sync::Arc;

use fsdp_comm::launch::{LaunchFailure, Launcher, Seat};
use fsdp_core::engine::ProgramOrder;
use fsdp_core::memory::{Buffer, Category, HostSliceMut, Slice};
use fsdp_core::{Error, Memory, Queue};
use fsdp_cuda::CudaMemory;
use fsdp_cuda::torch::{Kernels, Torch, allocator_bytes, reset_allocator_peaks};
use fsdp_nn::hf::HfModel;
use fsdp_train::verify::{VerifyOptions, verify};
use fsdp_train::{RankTrainer, TrainError};

use crate::jobs::{CardJob, diverging, policies, wide};
use crate::ranks::threads;

#[test]
fn sharded_runs_match_unsharded_and_predicted_memory() {
    for CardJob { job, what, .. } in &policies() {
        let report = verify(job, &threads(Kernels::Fused), &VerifyOptions::new(&[1, 2, 4], 3));
        let report = report.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(report.worlds.len(), 3, "{:?}", report.skipped);
        for world in &report.worlds {
            assert!(world.failures.is_empty(), "{what}, {}: {:#?}", world.world, world.failures);
        }
    }
}

#[test]
fn non_finite_loss_leaves_state_unchanged() {
    let CardJob { job, .. } = &diverging();
    let launched = threads(Kernels::Fused).launch(4, &|seat: Seat<Torch<CudaMemory>>| {
        let mut trainer = RankTrainer::new(job, seat)?;
        trainer.step(0, false, &mut ProgramOrder, &mut ())?;
        let before = state(&trainer)?;
        trainer.issue(1, false, &mut ProgramOrder, &mut ())?;
        trainer.issue(2, false, &mut ProgramOrder, &mut ())?;
        let failure = trainer.report().expect_err("the loss is not a number");
        assert!(matches!(failure, TrainError::NotFinite { step: 2, .. }), "{failure}");
        assert_eq!(state(&trainer)?, before);
        Ok(())
    });
    launched.unwrap_or_else(|failure: LaunchFailure<TrainError>| panic!("{failure:?}"));
}

/// Bytes that libtorch's allocator requests from the driver at once, for tensors between one and ten mebibytes.
const SEGMENT_BYTES: u64 = 20 << 20;

#[test]
fn libtorch_frees_temporaries_and_stays_below_activations() {
    let CardJob { job, .. } = &wide();
    let launched = threads(Kernels::Fused).launch(1, &|seat: Seat<Torch<CudaMemory>>| {
        let memory = Arc::clone(&seat.memory);
        let mut trainer = RankTrainer::new(job, seat)?;
        trainer.step(0, false, &mut ProgramOrder, &mut ())?;
        let device = memory.storage().device();
        reset_allocator_peaks(device)?;
        let first = allocator_bytes(device)?;
        for step in 1..4 {
            trainer.step(step, false, &mut ProgramOrder, &mut ())?;
        }
        let last = allocator_bytes(device)?;
        // Workspaces of libraries are allocated in the first step and kept.
        assert_eq!(last.allocated, first.allocated);
        // From the second step on, the cache splits into blocks differently, which takes at most one more segment.
        let more = last.reserved_peak - first.reserved_peak;
        assert!(more <= SEGMENT_BYTES, "{more} bytes more than after the first step");
        let temporaries = last.allocated_peak - last.allocated;
        let activations = trainer.usage().device.peak(Category::Activation) as u64;
        assert!(
            temporaries <= activations,
            "{temporaries} bytes of temporaries, {activations} of activations"
        );
        Ok(())
    });
    launched.unwrap_or_else(|failure: LaunchFailure<TrainError>| panic!("{failure:?}"));
}

/// Returns the bits of parameters and optimizer state.
fn state(trainer: &RankTrainer<'_, Torch<CudaMemory>, HfModel>) -> Result<Vec<Vec<u64>>, Error> {
    let engine = trainer.engine();
    let memory = Arc::clone(engine.memory());
    let mut all = Vec::new();
    for unit in engine.plan().layout.unit_ids() {
        let shards = engine.shards(unit);
        for buffer in shards.params.iter().chain(shards.state.iter().flatten()) {
            let mut values = vec![0.0; buffer.len()];
            memory.read(Queue::Compute, Slice::whole(buffer), HostSliceMut::F64(&mut values))?;
            all.push(values.into_iter().map(f64::to_bits).collect());
        }
    }
    Ok(all)
}
