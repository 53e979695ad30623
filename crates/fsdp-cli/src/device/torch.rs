//! Launchers of ranks as threads on the host that compute with libtorch.
//!
//! libtorch's own threads are configured here, before any rank starts.

use std::sync::Arc;

use fsdp_comm::process::cluster::Cluster;
use fsdp_config::{KernelChoice, RunConfig};
use fsdp_core::{Error, Rank};
use fsdp_cuda::torch::{Kernels, Torch, set_deterministic, set_intra_op};
use fsdp_nn::{HostMemory, HostOptions, HostPool};
use fsdp_sim::Threads;

use super::host::{self, threads_per_rank, total_threads};
use super::together::{OnHost, Together};
use super::work::Purpose;
use crate::error::CliError;

/// The ranks of this process. Those that are compared with the oracle have one thread each at every world size, because
/// libtorch may split sums by the number of threads.
///
/// # Errors
/// [`CliError`]: libtorch rejects a setting.
pub(crate) fn ranks(run: &RunConfig, purpose: Purpose) -> Result<Threads<Torch<HostMemory>>, CliError> {
    let threads = start(run, purpose, run.ranks)?;
    let (pool, kernels) = (HostPool::new(), kernels(run));
    Ok(Threads::new(host::world_options(run, purpose == Purpose::Training), move |_: Rank, _| {
        memory(purpose.options(&pool, threads), kernels)
    }))
}

/// The ranks of this process, one of several, and the oracle.
///
/// # Errors
/// [`CliError`]: libtorch rejects a setting.
pub(crate) fn processes(
    run: &RunConfig,
    purpose: Purpose,
    cluster: &Cluster,
) -> Result<OnHost<Torch<HostMemory>>, CliError> {
    let alone = ranks(&RunConfig { ranks: 1, ..run.clone() }, purpose)?;
    let (threads, kernels) = (start(run, purpose, cluster.ranks_on_machine())?, kernels(run));
    let processes =
        cluster.processes(move |_: Rank, _| memory(purpose.options(&HostPool::new(), threads), kernels));
    Ok(Together::new(alone, processes))
}

/// Applies settings of the process; returns the threads of each of the ranks on this machine.
fn start(run: &RunConfig, purpose: Purpose, ranks: usize) -> Result<usize, CliError> {
    let threads = match purpose {
        Purpose::Training => threads_per_rank(total_threads(run.threads), ranks),
        Purpose::Verification { .. } => 1,
    };
    set_deterministic(run.deterministic)?;
    set_intra_op(threads);
    Ok(threads)
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
