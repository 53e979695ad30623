//! Runs without the oracle: what each rank reported, holds and communicated.

use fsdp_comm::launch::{LaunchFailure, Launcher, Seat};
use fsdp_core::comm::Traffic;
use fsdp_core::engine::{IssueOrder, StepReport};
use fsdp_core::memory::{Buffer, Slice, Usage};
use fsdp_core::{Memory, Queue, Rank};
use fsdp_nn::model::Architecture;
use fsdp_nn::{HostBuffer, HostMemory};
use fsdp_train::{Job, RankTrainer, TrainError};

/// The results of one rank after its last step.
#[derive(Debug)]
pub(crate) struct RankOutcome {
    pub(crate) reports: Vec<StepReport>,
    /// Parameters, gradients and optimizer state of every unit, as bits of `f64`.
    pub(crate) shards: Vec<Vec<u64>>,
    pub(crate) traffic: Traffic,
    /// Memory usage after each step.
    pub(crate) usage: Vec<Usage>,
}

/// Trains `steps` steps with `jobs[rank % jobs.len()]`: one job for all ranks, or one per rank.
pub(crate) fn train<L, A>(
    jobs: &[Job<A>],
    launcher: &L,
    steps: u64,
    order: impl Fn(Rank) -> Box<dyn IssueOrder> + Sync,
) -> Result<Vec<RankOutcome>, LaunchFailure<TrainError>>
where
    L: Launcher<Memory = HostMemory>,
    A: Architecture + Clone,
{
    launcher.launch(jobs[0].plan.mesh.world(), &|seat: Seat<HostMemory>| {
        let job = &jobs[seat.rank.0 % jobs.len()];
        let mut order = order(seat.rank);
        let mut trainer = RankTrainer::new(job, seat)?;
        let (mut reports, mut usage) = (Vec::new(), Vec::new());
        for step in 0..steps {
            reports.push(trainer.step(step, false, &mut *order, &mut ())?);
            usage.push(trainer.usage());
        }
        let shards = shards(&trainer)?;
        Ok(RankOutcome { reports, shards, traffic: trainer.traffic(), usage })
    })
}

/// Returns parameters, gradients and optimizer state of every unit, as bits of `f64`.
pub(crate) fn shards<A: Architecture + Clone>(
    trainer: &RankTrainer<'_, HostMemory, A>,
) -> Result<Vec<Vec<u64>>, TrainError> {
    let engine = trainer.engine();
    let mut all = Vec::new();
    for unit in engine.plan().layout.unit_ids() {
        for gradient in engine.shards(unit).gradients {
            all.push(bits(engine.memory(), gradient)?);
        }
    }
    all.extend(state(trainer)?);
    Ok(all)
}

/// Returns parameters and optimizer state of every unit, as bits of `f64`.
pub(crate) fn state<A: Architecture + Clone>(
    trainer: &RankTrainer<'_, HostMemory, A>,
) -> Result<Vec<Vec<u64>>, TrainError> {
    let engine = trainer.engine();
    let mut all = Vec::new();
    for unit in engine.plan().layout.unit_ids() {
        let shards = engine.shards(unit);
        for buffer in shards.params.iter().chain(shards.state.iter().flatten()) {
            all.push(bits(engine.memory(), buffer)?);
        }
    }
    Ok(all)
}

fn bits(memory: &HostMemory, buffer: &HostBuffer) -> Result<Vec<u64>, TrainError> {
    let mut values = vec![0.0; buffer.len()];
    memory.read_numbers(Queue::Compute, Slice::whole(buffer), &mut values)?;
    Ok(values.into_iter().map(f64::to_bits).collect())
}
