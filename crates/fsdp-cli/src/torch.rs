//! Launchers of ranks as threads on the host that compute with libtorch.
//!
//! As for [`host`], training shares storage between ranks, verification does not. libtorch's own threads are configured
//! here, before any rank starts.

use std::sync::Arc;

use fsdp_comm::process::cluster::Cluster;
use fsdp_comm::process::launch::Processes;
use fsdp_config::{KernelChoice, RunConfig};
use fsdp_core::{Error, Rank};
use fsdp_cuda::torch::{Kernels, Torch, set_deterministic, set_intra_op};
use fsdp_nn::{HostMemory, HostOptions, HostPool};
use fsdp_sim::Threads;

use crate::error::CliError;
use crate::host::{self, threads_per_rank, total_threads};
use crate::verify::{OnHost, Together};

/// Ranks that train or are measured: they share one pool, and gathered parameters are stored once.
///
/// # Errors
/// [`CliError`]: libtorch rejects a setting.
pub(crate) fn training(run: &RunConfig) -> Result<Threads<Torch<HostMemory>>, CliError> {
    let threads = threads_per_rank(total_threads(run.threads), run.ranks);
    set_deterministic(run.deterministic)?;
    set_intra_op(threads);
    let (pool, kernels) = (HostPool::new(), kernels(run));
    Ok(Threads::new(host::world_options(run, true), move |_: Rank, _| {
        memory(HostOptions { pool: Arc::clone(&pool), threads, poison: false, resident: false }, kernels)
    }))
}

/// The ranks of this process, one of several.
///
/// # Errors
/// [`CliError`]: libtorch rejects a setting.
pub(crate) fn processes(
    run: &RunConfig,
    cluster: &Cluster,
) -> Result<Processes<Torch<HostMemory>>, CliError> {
    let threads = threads_per_rank(total_threads(run.threads), cluster.ranks_on_machine());
    set_deterministic(run.deterministic)?;
    set_intra_op(threads);
    let kernels = kernels(run);
    Ok(cluster.processes(move |_: Rank, _| {
        memory(HostOptions { pool: HostPool::new(), threads, poison: false, resident: false }, kernels)
    }))
}

/// Ranks that are compared with the oracle: they share nothing, and have one thread each at every world size, because
/// libtorch may split sums by the number of threads.
///
/// # Errors
/// [`CliError`]: libtorch rejects a setting.
pub(crate) fn verification(run: &RunConfig, poison: bool) -> Result<Threads<Torch<HostMemory>>, CliError> {
    set_deterministic(run.deterministic)?;
    set_intra_op(1);
    let kernels = kernels(run);
    Ok(Threads::new(host::world_options(run, false), move |_: Rank, _| {
        memory(HostOptions { pool: HostPool::new(), threads: 1, poison, resident: true }, kernels)
    }))
}

/// The ranks of this process, one of several, that are compared with the oracle, and the oracle.
///
/// # Errors
/// [`CliError`]: libtorch rejects a setting.
pub(crate) fn verification_processes(
    run: &RunConfig,
    poison: bool,
    cluster: &Cluster,
) -> Result<OnHost<Torch<HostMemory>>, CliError> {
    let alone = verification(&RunConfig { ranks: 1, ..run.clone() }, poison)?;
    let kernels = kernels(run);
    let processes = cluster.processes(move |_: Rank, _| {
        memory(HostOptions { pool: HostPool::new(), threads: 1, poison, resident: true }, kernels)
    });
    Ok(Together::new(alone, processes))
}

fn memory(options: HostOptions, kernels: Kernels) -> Result<Arc<Torch<HostMemory>>, Error> {
    Ok(Arc::new(Torch::new(host::memory(options)?, kernels)))
}

/// The implementation of operations that have several.
pub(crate) fn kernels(run: &RunConfig) -> Kernels {
    match run.kernels {
        KernelChoice::Fused => Kernels::Fused,
        KernelChoice::Aten => Kernels::Aten,
    }
}
