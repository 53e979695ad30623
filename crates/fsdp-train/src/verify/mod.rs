//! Verification: sharded training against the oracle, on the user's own configuration.
//!
//! For each world size, the sharded engine and the plain unsharded [oracle](crate::Oracle) train the same
//! steps. Where contract D2 promises bits (docs/numerics.md), everything must be equal; elsewhere the
//! gradients of the first step and their norm must lie within derived bounds, and losses are printed with their largest
//! difference. Communication is compared with closed forms, memory with the ledger, to the byte.

mod bound;
mod closed_form;
mod compare;
mod coverage;
mod promise;
mod report;
mod snapshot;

pub use closed_form::{expected_loading_traffic, expected_traffic};
pub use promise::Promise;
pub use report::{Difference, MemoryLine, Skipped, VerifyReport, WorldReport};

use fsdp_comm::launch::{Launcher, Seat};
use fsdp_core::FailureKind;
use fsdp_core::comm::Traffic;
use fsdp_core::engine::{IssueOrder, ProgramOrder, StepReport};
use fsdp_core::memory::Usage;
use fsdp_nn::model::Architecture;

use crate::error::TrainError;
use crate::job::Job;
use crate::memory::expect_room_to_verify;
use crate::oracle::Oracle;
use crate::rank::RankTrainer;
use crate::rule::TrainBackend;

use snapshot::{Pieces, Snapshot};

/// What to verify.
pub struct VerifyOptions<'a> {
    /// World sizes; those that do not fit the configuration are reported as skipped.
    pub world_sizes: Vec<usize>,
    /// Steps to train.
    pub steps: u64,
    /// Makes the order in which each rank issues operations.
    pub order: &'a (dyn Fn(fsdp_core::Rank) -> Box<dyn IssueOrder> + Sync),
    /// Told which world size begins; `None` is the oracle.
    pub progress: &'a (dyn Fn(Option<usize>) + Sync),
}

impl VerifyOptions<'_> {
    /// `steps` steps at `world_sizes`, in program order.
    pub fn new(world_sizes: &[usize], steps: u64) -> Self {
        Self {
            world_sizes: world_sizes.to_vec(),
            steps,
            order: &|_| Box::new(ProgramOrder),
            progress: &|_| {},
        }
    }
}

/// What the oracle found.
struct Reference {
    reports: Vec<StepReport>,
    /// After the first step: gradients, and the sums of absolute leaves.
    first: Snapshot,
    magnitudes: Vec<Vec<f64>>,
    last: Snapshot,
}

/// What one rank found.
struct RankRun {
    reports: Vec<StepReport>,
    first: Pieces,
    last: Pieces,
    traffic: Traffic,
    /// After the first step, and after the last.
    settled: Usage,
    usage: Usage,
}

/// Trains `job` unsharded and sharded, and compares.
///
/// # Errors
/// [`TrainError`] when a run fails. Broken promises are no errors: [`VerifyReport::holds`] says.
pub fn verify<L, A>(
    job: &Job<A>,
    launcher: &L,
    options: &VerifyOptions<'_>,
) -> Result<VerifyReport, TrainError>
where
    L: Launcher,
    L::Memory: TrainBackend,
    A: Architecture + Clone,
{
    let mut report = VerifyReport::new(job, options.steps);
    let mut jobs = Vec::new();
    for &world in &options.world_sizes {
        match job.at_world(world) {
            Ok(job) => jobs.push((world, job)),
            Err(error) if error.kind() == FailureKind::Input => {
                report.skipped.push(Skipped { world, reason: error.to_string() });
            }
            Err(error) => return Err(error),
        }
    }
    if jobs.is_empty() {
        return Ok(report);
    }
    for (_, job) in &jobs {
        expect_room_to_verify::<L::Memory, A>(job)?;
    }
    (options.progress)(None);
    let reference = launcher
        .launch(1, &|seat: Seat<L::Memory>| oracle(job, seat, options.steps))?
        .pop()
        .expect("one rank ran");
    report.oracle_losses = reference.reports.iter().map(|report| report.loss).collect();
    for (world, job) in jobs {
        (options.progress)(Some(world));
        let ranks = launcher.launch(world, &|seat: Seat<L::Memory>| {
            let mut order = (options.order)(seat.rank);
            sharded(&job, seat, options.steps, &mut *order)
        })?;
        report.worlds.push(compare::world::<L::Memory, A>(&job, &reference, &ranks, options.steps)?);
    }
    Ok(report)
}

fn oracle<M: TrainBackend, A: Architecture + Clone>(
    job: &Job<A>,
    seat: Seat<M>,
    steps: u64,
) -> Result<Reference, TrainError> {
    let mut oracle = Oracle::new(job, seat.memory)?;
    let mut reports = Vec::new();
    let mut first = None;
    let mut magnitudes = Vec::new();
    for step in 0..steps {
        reports.push(oracle.step(step, step == 0)?);
        if step == 0 {
            first = Some(Snapshot::of_oracle(&oracle, &job.plan.spec)?);
            magnitudes = oracle.magnitudes().map(<[Vec<f64>]>::to_vec).unwrap_or_default();
        }
    }
    let last = Snapshot::of_oracle(&oracle, &job.plan.spec)?;
    Ok(Reference { reports, first: first.unwrap_or_else(|| last.clone()), magnitudes, last })
}

fn sharded<M: TrainBackend, A: Architecture + Clone>(
    job: &Job<A>,
    seat: Seat<M>,
    steps: u64,
    order: &mut dyn IssueOrder,
) -> Result<RankRun, TrainError> {
    let mut trainer = RankTrainer::new(job, seat)?;
    let mut reports = Vec::new();
    let mut first = Pieces::default();
    let mut settled = trainer.usage();
    for step in 0..steps {
        reports.push(trainer.step(step, false, order, &mut ())?);
        if step == 0 {
            first = Pieces::of_rank(trainer.engine())?;
            settled = trainer.usage();
        }
    }
    let last = Pieces::of_rank(trainer.engine())?;
    let usage = trainer.usage();
    Ok(RankRun { reports, first, last, traffic: trainer.traffic(), settled, usage })
}

#[cfg(test)]
mod tests;
