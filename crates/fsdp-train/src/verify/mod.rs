//! Verification: sharded training against the oracle, on the user's own configuration.
//!
//! For each world size, the sharded engine and the plain unsharded [oracle](crate::Oracle) train the same steps. Where
//! contract D2 promises equal bits (docs/numerics.md), everything must be equal. Elsewhere the gradients of the first
//! step and their norm must be within derived bounds, and losses are printed with their largest difference.
//! Communication is compared with closed forms and memory with the ledger, to the byte.
//!
//! With ranks in several processes, the oracle runs in the first process, and the others send it the values of their
//! ranks: up to one gibibyte per rank, which is some 26 million parameters per rank with AdamW.

mod bound;
mod closed_form;
mod compare;
mod coverage;
mod promise;
mod report;
mod snapshot;
mod wire;

pub use promise::Promise;
pub use report::{Difference, MemoryLine, Skipped, VerifyReport, WorldReport};

use std::sync::Arc;
use std::time::Duration;

use fsdp_comm::assembly::Assembly;
use fsdp_comm::launch::{Launcher, Seat};
use fsdp_comm::process::VALUE_MAX;
use fsdp_config::Ranks;
use fsdp_core::comm::Traffic;
use fsdp_core::engine::{IssueOrder, ProgramOrder, StepReport};
use fsdp_core::memory::Usage;
use fsdp_core::{FailureKind, Mesh, Rank};
use fsdp_nn::Backend;
use fsdp_nn::model::Architecture;

use crate::error::TrainError;
use crate::job::Job;
use crate::memory::expect_room_to_verify;
use crate::oracle::Oracle;
use crate::rank::RankTrainer;
use crate::wire_result;

use bound::Rounding;
use snapshot::{Pieces, Snapshot};

/// Topics: the oracle has ended, the results of each rank, and whether all promises were kept.
const ORACLE: &str = "oracle";
const FOUND: &str = "found";
const HOLDS: &str = "holds";

/// How long processes wait for each other outside of collectives. A process that fails ends all waiting at once.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(7 * 24 * 3600);

/// Options of a verification.
pub struct VerifyOptions<'a> {
    /// The worlds to verify; those that do not fit the configuration are reported as skipped.
    pub worlds: Vec<Ranks>,
    /// Number of steps to train.
    pub steps: u64,
    /// Creates the order in which each rank issues operations.
    pub order: &'a (dyn Fn(fsdp_core::Rank) -> Box<dyn IssueOrder> + Sync),
    /// Called when a world begins; with `None`, the oracle.
    pub progress: &'a (dyn Fn(Option<Mesh>) + Sync),
}

impl VerifyOptions<'_> {
    /// Verifies `steps` steps at each of `world_sizes`, issuing operations in program order.
    pub fn new(world_sizes: &[usize], steps: u64) -> Self {
        Self {
            worlds: world_sizes.iter().copied().map(Ranks::Count).collect(),
            steps,
            order: &|_| Box::new(ProgramOrder),
            progress: &|_| {},
        }
    }
}

/// The results of the oracle.
struct Reference {
    reports: Vec<StepReport>,
    /// Values after the first step that was not skipped; `magnitudes` are its sums of absolute leaves.
    first: Snapshot,
    magnitudes: Vec<Vec<f64>>,
    last: Snapshot,
    /// Set if the ranks' kernels are not the oracle's.
    rounding: Option<Rounding>,
}

/// The results of one rank.
struct RankRun {
    reports: Vec<StepReport>,
    first: Pieces,
    last: Pieces,
    traffic: Traffic,
    /// Memory usage after the first step; `usage` is that after the last.
    settled: Usage,
    usage: Usage,
}

/// The result of a verification, in each process.
pub struct Verified {
    /// The result of [`VerifyReport::holds`], in all processes.
    pub holds: bool,
    /// The report; `Some` only in the process of the first rank.
    pub report: Option<VerifyReport>,
}

/// Trains `job` unsharded and sharded, and compares. All ranks of the launcher must be in this process.
///
/// # Errors
/// [`TrainError`] if a run fails. A broken promise is not an error: see [`VerifyReport::holds`].
///
/// # Panics
/// If the first rank is in another process.
pub fn verify<L: Launcher<Memory: Backend>, A: Architecture + Clone>(
    job: &Job<A>,
    launcher: &L,
    options: &VerifyOptions<'_>,
) -> Result<VerifyReport, TrainError> {
    let verified = verify_together(job, launcher, options)?;
    Ok(verified.report.expect("all ranks are of this process"))
}

/// Like [`verify`], with ranks in one or several processes, all of which call it. The launcher runs a world of one rank
/// in the process of the first rank only.
///
/// # Errors
/// Errors of [`verify`]; [`TrainError::Input`] if there is more to compare than processes can exchange.
pub fn verify_together<L: Launcher<Memory: Backend>, A: Architecture + Clone>(
    job: &Job<A>,
    launcher: &L,
    options: &VerifyOptions<'_>,
) -> Result<Verified, TrainError> {
    let mut report = VerifyReport::new(job, options.steps);
    let mut jobs = Vec::new();
    for &ranks in &options.worlds {
        match job.at(ranks) {
            Ok(job) => jobs.push((ranks.count(), job)),
            Err(error) if error.kind() == FailureKind::Input => {
                report.skipped.push(Skipped { world: ranks.count(), reason: error.to_string() });
            }
            Err(error) => return Err(error),
        }
    }
    let Some(&(first, _)) = jobs.first() else {
        return Ok(Verified { holds: false, report: Some(report) });
    };
    for (world, job) in &jobs {
        expect_room_to_verify::<L::Memory, A>(job, launcher.ranks_on_machine(*world))?;
    }
    let assembly = launcher.assemble(first);
    let reference = match assembly.is_leader() {
        true => {
            (options.progress)(None);
            let oracle = |seat: Seat<L::Memory>| oracle(job, seat, options.steps);
            let reference = launcher.launch(1, &oracle)?.pop().expect("one rank ran");
            assembly.announce(ORACLE, Vec::new())?;
            Some(reference)
        }
        // Without this, they would wait for the first rank in a collective, which has a time limit.
        false => {
            assembly.hear(ORACLE, EXCHANGE_TIMEOUT)?;
            None
        }
    };
    let losses = |reference: &Reference| reference.reports.iter().map(|report| report.loss).collect();
    report.oracle_losses = reference.as_ref().map_or_else(Vec::new, losses);
    for (world, job) in jobs {
        (options.progress)(Some(job.plan.mesh));
        let assembly = launcher.assemble(world);
        let ranks = launcher.launch(world, &|seat: Seat<L::Memory>| {
            let mut order = (options.order)(seat.rank);
            sharded(&job, seat, options.steps, &mut *order)
        })?;
        if let (Some(ranks), Some(reference)) = (collect(&*assembly, ranks)?, &reference) {
            report.worlds.push(compare::world::<L::Memory, A>(&job, reference, &ranks, options.steps)?);
        }
    }
    conclude(&*assembly, report)
}

/// Collects the results of all ranks in the first process; `None` in the others.
fn collect(assembly: &dyn Assembly, ranks: Vec<RankRun>) -> Result<Option<Vec<RankRun>>, TrainError> {
    if ranks.len() == assembly.world() {
        return Ok(Some(ranks));
    }
    for (rank, run) in assembly.local().map(Rank).zip(ranks) {
        let bytes = wire::encode(&run);
        if bytes.len() > VALUE_MAX {
            return Err(TrainError::Input(format!(
                "{rank} has {} bytes to compare, but processes can exchange at most {VALUE_MAX}: verify with --shrink, with \
                 more ranks, or in one process",
                bytes.len()
            )));
        }
        assembly.give(FOUND, rank, bytes)?;
    }
    if !assembly.is_leader() {
        return Ok(None);
    }
    let found = assembly.collect(FOUND, assembly.world(), EXCHANGE_TIMEOUT)?;
    Ok(Some(found.iter().map(|bytes| wire::decode(bytes)).collect()))
}

/// Announces to all processes whether all promises were kept.
fn conclude(assembly: &dyn Assembly, report: VerifyReport) -> Result<Verified, TrainError> {
    if assembly.is_leader() {
        let holds = report.holds();
        assembly.announce(HOLDS, wire_result::encode(Ok(&holds)))?;
        return Ok(Verified { holds, report: Some(report) });
    }
    let holds = wire_result::decode(&assembly.hear(HOLDS, EXCHANGE_TIMEOUT)?)?;
    Ok(Verified { holds, report: None })
}

fn oracle<M: Backend, A: Architecture + Clone>(
    job: &Job<A>,
    seat: Seat<M>,
    steps: u64,
) -> Result<Reference, TrainError> {
    let mut oracle = Oracle::new(job, Arc::clone(&seat.memory))?;
    let mut reports = Vec::new();
    // With the step's loss scale.
    let mut first: Option<(Snapshot, f64)> = None;
    let mut magnitudes = Vec::new();
    for step in 0..steps {
        let scale = oracle.loss_scale();
        let report = oracle.step(step, first.is_none())?;
        if first.is_none() && report.finite {
            first = Some((Snapshot::of_oracle(&oracle, &job.plan.spec)?, scale));
            magnitudes = oracle.magnitudes().map(<[Vec<f64>]>::to_vec).unwrap_or_default();
        }
        reports.push(report);
    }
    let last = Snapshot::of_oracle(&oracle, &job.plan.spec)?;
    drop(oracle);
    let rounding = match &first {
        Some((first, scale)) if Promise::of(&job.config) == Promise::Near => {
            Some(rounding(job, seat.memory, (&reports, first, *scale))?)
        }
        _ => None,
    };
    let first = first.map_or_else(|| last.clone(), |(first, _)| first);
    Ok(Reference { reports, first, magnitudes, last, rounding })
}

/// Measures the rounding errors of the first applied step, by repeating it in double precision: skipped steps change no
/// parameters. Initial values are not rounded there, so their rounding counts too. Takes twice the memory of an oracle in
/// single precision, which is dropped before.
fn rounding<M: Backend, A: Architecture + Clone>(
    job: &Job<A>,
    memory: Arc<M>,
    (reports, first, scale): (&[StepReport], &Snapshot, f64),
) -> Result<Rounding, TrainError> {
    let job = job.in_double()?;
    let mut oracle = Oracle::new(&job, memory)?;
    let step = reports.iter().position(|report| report.finite).expect("a step was applied");
    let report = oracle.step(step as u64, false)?;
    let exact = Snapshot::of_oracle(&oracle, &job.plan.spec)?;
    let largest = |(rounded, exact): (&Vec<f64>, &Vec<f64>)| {
        let errors = rounded.iter().zip(exact).map(|(rounded, exact)| (rounded - exact * scale).abs());
        errors.fold(0.0, f64::max)
    };
    let gradients = first.gradients.iter().flatten().zip(exact.gradients.iter().flatten()).map(largest);
    Ok(Rounding { loss: (reports[step].loss - report.loss).abs(), gradients: gradients.collect() })
}

fn sharded<M: Backend, A: Architecture + Clone>(
    job: &Job<A>,
    seat: Seat<M>,
    steps: u64,
    order: &mut dyn IssueOrder,
) -> Result<RankRun, TrainError> {
    let mut trainer = RankTrainer::new(job, seat)?;
    let mut reports = Vec::new();
    let mut first = None;
    let mut settled = trainer.usage();
    for step in 0..steps {
        let report = trainer.step(step, false, order, &mut ())?;
        if first.is_none() && report.finite {
            first = Some(Pieces::of_rank(trainer.engine())?);
        }
        if step == 0 {
            settled = trainer.usage();
        }
        reports.push(report);
    }
    let last = Pieces::of_rank(trainer.engine())?;
    let usage = trainer.usage();
    let first = first.unwrap_or_else(|| last.clone());
    Ok(RankRun { reports, first, last, traffic: trainer.traffic(), settled, usage })
}

#[cfg(test)]
mod tests;
