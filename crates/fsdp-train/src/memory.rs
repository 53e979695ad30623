//! Whether a job fits into this machine, asked before anything of it is allocated.
//!
//! What is compared is what will surely be held at one time, so that nothing is refused that would run: the ledger's
//! prediction, which is exact, for as many ranks as hold it at once. Ranks of a training run hold gathered parameters once
//! and give storage back with its contents ([`ledger::moving`](fsdp_core::ledger::moving)); ranks that are verified share
//! nothing and keep what they have. The data is opened before: tokens in memory are in use already when it is asked what is
//! left, and those of mapped files are in the kernel's cache, which counts as left. Where a GPU computes, its memory is asked
//! by allocating it, and says itself when it is full.

mod available;
mod shortage;

use fsdp_core::memory::Category;
use fsdp_core::plan::Plan;
use fsdp_nn::model::Architecture;

pub use available::{Available, Limit};
pub use shortage::{Part, Shortage};

use crate::config::{Device, Resolved};
use crate::error::TrainError;
use crate::events;
use crate::job::{Forecast, Job, forecast};
use crate::rule::TrainBackend;

/// The part of what ranks hold together that is not counted, for those that are between two waits.
const BETWEEN_WAITS: u64 = 20;

/// Whether ranks share storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Storage {
    /// One pool, gathered parameters held once.
    Shared,
    /// Every rank has its own, and keeps it.
    Separate,
}

/// That those ranks of a training run that are on this machine fit into the memory that it and its limits leave.
///
/// # Errors
/// [`TrainError::NotEnoughMemory`]; those of the model: operations that do not fit each other.
pub fn expect_room_to_train<M: TrainBackend, A: Architecture + Clone>(
    job: &Job<A>,
    ranks_on_machine: usize,
) -> Result<(), TrainError> {
    expect_room_for::<M, A>(&job.config, &job.architecture, &job.plan, ranks_on_machine)
}

/// As [`expect_room_to_train`], before the data is opened.
///
/// # Errors
/// As [`expect_room_to_train`].
pub fn expect_room_for<M: TrainBackend, A: Architecture + Clone>(
    config: &Resolved,
    architecture: &A,
    plan: &Plan,
    ranks_on_machine: usize,
) -> Result<(), TrainError> {
    let forecast = || forecast::<M, A>(config, architecture, plan);
    expect(forecast, (config, plan), ranks_on_machine, Storage::Shared, Available::now())
}

/// That the ranks of a verification fit, each with storage of its own.
///
/// # Errors
/// As [`expect_room_to_train`].
pub(crate) fn expect_room_to_verify<M: TrainBackend, A: Architecture + Clone>(
    job: &Job<A>,
    ranks_on_machine: usize,
) -> Result<(), TrainError> {
    expect(
        || job.forecast::<M>(),
        (&job.config, &job.plan),
        ranks_on_machine,
        Storage::Separate,
        Available::now(),
    )
}

fn expect(
    forecast: impl FnOnce() -> Result<Forecast, TrainError>,
    (config, plan): (&Resolved, &Plan),
    ranks: usize,
    storage: Storage,
    available: Option<Available>,
) -> Result<(), TrainError> {
    // Where nothing says what there is, allocating it will.
    let (Some(available), Device::Cpu | Device::TorchCpu) = (available, config.run.device) else {
        return Ok(());
    };
    let forecast = forecast()?;
    events::predicted_memory(&forecast.usage);
    let parts = parts((config, plan), ranks, storage, &forecast);
    let needed_bytes = parts.iter().map(|part| part.bytes).sum();
    if needed_bytes <= available.bytes {
        return Ok(());
    }
    Err(TrainError::NotEnoughMemory(Box::new(Shortage { parts, ranks, needed_bytes, available })))
}

/// What `ranks` ranks hold, by what it is for.
fn parts(
    (config, plan): (&Resolved, &Plan),
    ranks: usize,
    storage: Storage,
    forecast: &Forecast,
) -> Vec<Part> {
    let (is_all, ranks) = (ranks == plan.mesh.world(), ranks as u64);
    let (device, host) = (&forecast.usage.device, &forecast.usage.host);
    let kept = |category: Category| device.live(category) + host.live(category);
    let of_all = |name, per_rank: usize| {
        let per_rank_bytes = per_rank as u64;
        Part { name, per_rank_bytes, bytes: per_rank_bytes.saturating_mul(ranks) }
    };
    let of_category = |category: Category| of_all(category.name(), kept(category));
    let mut parts = Vec::new();
    match storage {
        Storage::Shared => {
            parts.extend(
                [Category::ParameterShard, Category::OptimizerState, Category::CommStaging].map(of_category),
            );
            let (rank, world) = (forecast.moving.rank_bytes as u64, forecast.moving.world_bytes as u64);
            // Of ranks that wait for others elsewhere less is known. Where all are here, some are just between two waits and
            // hold less than the schedule says of either: seen were two parts in a thousand of everything.
            let world = if is_all && ranks > 1 { world - world / BETWEEN_WAITS } else { rank };
            let name = "gathered parameters, activations and gradients";
            parts.push(Part { name, per_rank_bytes: rank, bytes: world });
        }
        Storage::Separate => {
            let is_kept =
                |category: &Category| !matches!(category, Category::Activation | Category::Workspace);
            let own: Vec<Category> = Category::ALL.into_iter().filter(is_kept).collect();
            let all: usize = own.iter().map(|&category| device.live(category)).sum();
            parts.extend(own.into_iter().map(of_category));
            let moving = (device.total_peak_bytes - all) as u64;
            parts.push(Part { name: "activations and workspace", per_rank_bytes: moving, bytes: moving });
        }
    }
    if storage == Storage::Shared && config.checkpoint.every > 0 {
        let master = plan.policy.param_dtype.master().size_bytes();
        let copy = (forecast.shard_elements * master + kept(Category::OptimizerState)) as u64;
        let bytes = copy.saturating_mul((plan.mesh.shards() as u64).min(ranks));
        parts.push(Part { name: "copy that a checkpoint is written from", per_rank_bytes: copy, bytes });
    }
    parts.retain(|part| part.bytes > 0);
    parts
}

#[cfg(test)]
mod tests;
