//! Checks that a job fits into this machine, before allocating any of it.
//!
//! The check uses a lower bound of the memory held at one time, so that it never refuses a job that would run: the
//! ledger's prediction, which is exact, for as many ranks as hold it at once. Ranks of a training run store gathered
//! parameters once and free storage together with its contents ([`ledger::moving`](fsdp_core::ledger::moving)); ranks
//! of a verification share nothing and keep their storage. Data is opened before: tokens in memory are already in use
//! when the check asks what is left, and tokens of mapped files are in the kernel's cache, which counts as available.
//! GPU memory is not checked: allocating it fails when it is full.

mod available;
mod shortage;

use fsdp_comm::ranks::STACK_BYTES;
use fsdp_config::{Device, Resolved};
use fsdp_core::memory::Category;
use fsdp_core::plan::Plan;
use fsdp_nn::Backend;
use fsdp_nn::model::Architecture;

pub(crate) use available::{Available, Limit};
use shortage::{Part, shortage};

use crate::error::TrainError;
use crate::events;
use crate::job::{Forecast, Job, forecast};

/// Reciprocal of the part of the ranks' common memory that is not counted, on behalf of ranks that are between two
/// waits.
const BETWEEN_WAITS: u64 = 20;

/// Whether ranks share storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Storage {
    /// One pool for all ranks, with gathered parameters stored once.
    Shared,
    /// Every rank has its own storage, and keeps it.
    Separate,
}

/// Checks that the ranks of a training run on this machine fit into the memory that the machine and its limits leave.
///
/// # Errors
/// [`TrainError::Input`] if they do not; those of the model, for operations that do not fit together.
pub fn expect_room_to_train<M: Backend, A: Architecture + Clone>(
    job: &Job<A>,
    ranks_on_machine: usize,
) -> Result<(), TrainError> {
    expect_room_for::<M, A>(&job.config, &job.architecture, &job.plan, ranks_on_machine)
}

/// Like [`expect_room_to_train`], before the data is opened.
///
/// # Errors
/// As [`expect_room_to_train`].
pub fn expect_room_for<M: Backend, A: Architecture + Clone>(
    config: &Resolved,
    architecture: &A,
    plan: &Plan,
    ranks_on_machine: usize,
) -> Result<(), TrainError> {
    let forecast = || forecast::<M, A>(config, architecture, plan);
    expect(forecast, (config, plan), ranks_on_machine, Storage::Shared, Available::now())
}

/// Checks that the ranks of a verification fit, each with its own storage.
///
/// # Errors
/// As [`expect_room_to_train`].
pub(crate) fn expect_room_to_verify<M: Backend, A: Architecture + Clone>(
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
    // Without limits to compare with, allocation itself will tell.
    let (Some(available), Device::Cpu | Device::TorchCpu) = (available, config.run.device) else {
        return Ok(());
    };
    let forecast = forecast()?;
    events::predicted_memory(&forecast.usage);
    let mut parts = parts((config, plan), ranks, storage, &forecast);
    if available.limit == Limit::AddressSpace {
        let per_rank_bytes = STACK_BYTES as u64;
        let bytes = per_rank_bytes.saturating_mul(ranks as u64);
        parts.push(Part { name: "stacks of threads", per_rank_bytes, bytes });
    }
    let needed_bytes = parts.iter().map(|part| part.bytes).sum();
    if needed_bytes <= available.bytes {
        return Ok(());
    }
    Err(TrainError::Input(shortage(&parts, ranks, needed_bytes, &available)))
}

/// The memory of `ranks` ranks, by purpose.
fn parts(
    (config, plan): (&Resolved, &Plan),
    ranks: usize,
    storage: Storage,
    forecast: &Forecast,
) -> Vec<Part> {
    let (is_entire_world, ranks) = (ranks == plan.mesh.world(), ranks as u64);
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
            // Less is known about ranks that wait for others on other machines. If all are here, some are between two
            // waits and hold less than the schedule predicts for either: a difference of 0.2% of everything has been
            // observed.
            let world = if is_entire_world && ranks > 1 { world - world / BETWEEN_WAITS } else { rank };
            let name = "gathered parameters, activations and gradients";
            parts.push(Part { name, per_rank_bytes: rank, bytes: world });
        }
        Storage::Separate => {
            let is_kept =
                |category: &Category| !matches!(category, Category::Activation | Category::Workspace);
            let kept_categories: Vec<Category> = Category::ALL.into_iter().filter(is_kept).collect();
            let all: usize = kept_categories.iter().map(|&category| device.live(category)).sum();
            parts.extend(kept_categories.into_iter().map(of_category));
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
