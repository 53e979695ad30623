//! Launchers of ranks as threads on the host.
//!
//! Training shares storage between ranks to save memory; verification gives every rank its own, so that shared state
//! cannot hide a difference between ranks.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use fsdp_comm::process::cluster::Cluster;
use fsdp_comm::process::launch::Processes;
use fsdp_config::RunConfig;
use fsdp_core::{Error, Rank};
use fsdp_nn::{HostMemory, HostOptions, HostPool};
use fsdp_sim::{ThreadOptions, Threads};

use crate::verify::{OnHost, Together};

/// Ranks that train or are measured: they share one pool, and gathered parameters are stored once.
pub(crate) fn training(run: &RunConfig) -> Threads<HostMemory> {
    let pool = HostPool::new();
    let total = total_threads(run.threads);
    Threads::new(world_options(run, true), move |_: Rank, world| {
        let threads = threads_per_rank(total, world);
        memory(HostOptions { pool: Arc::clone(&pool), threads, poison: false, resident: false })
    })
}

/// The ranks of this process, one of several: each has its own storage, and its share of the machine's cores.
pub(crate) fn processes(run: &RunConfig, cluster: &Cluster) -> Processes<HostMemory> {
    let threads = threads_per_rank(total_threads(run.threads), cluster.ranks_on_machine());
    cluster.processes(move |_: Rank, _| {
        memory(HostOptions { pool: HostPool::new(), threads, poison: false, resident: false })
    })
}

/// Ranks that are compared with the oracle: they share nothing. With `poison`, released contents are overwritten.
pub(crate) fn verification(run: &RunConfig, poison: bool) -> Threads<HostMemory> {
    let total = total_threads(run.threads);
    Threads::new(world_options(run, false), move |_: Rank, world| {
        let threads = threads_per_rank(total, world);
        memory(HostOptions { pool: HostPool::new(), threads, poison, resident: true })
    })
}

/// The ranks of this process, one of several, that are compared with the oracle, and the oracle.
pub(crate) fn verification_processes(run: &RunConfig, poison: bool, cluster: &Cluster) -> OnHost<HostMemory> {
    let threads = threads_per_rank(total_threads(run.threads), cluster.ranks_on_machine());
    let processes = cluster.processes(move |_: Rank, _| {
        memory(HostOptions { pool: HostPool::new(), threads, poison, resident: true })
    });
    Together::new(verification(&RunConfig { ranks: 1, ..run.clone() }, poison), processes)
}

/// The host memory of a rank.
pub(crate) fn memory(options: HostOptions) -> Result<Arc<HostMemory>, Error> {
    Ok(Arc::new(HostMemory::new(options)?))
}

pub(crate) fn world_options(run: &RunConfig, share_unsharded: bool) -> ThreadOptions {
    ThreadOptions {
        cores: total_threads(run.threads),
        timeout: Duration::from_secs_f64(run.timeout_s),
        share_unsharded,
        ..ThreadOptions::default()
    }
}

/// Compute threads of all ranks: as configured, or one per core.
pub(crate) fn total_threads(configured: usize) -> usize {
    match configured {
        0 => thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    }
}

/// Compute threads per rank.
pub(crate) fn threads_per_rank(total: usize, world: usize) -> usize {
    (total / world).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_divided_among_ranks() {
        assert_eq!(threads_per_rank(8, 2), 4);
        assert_eq!(threads_per_rank(8, 3), 2);
        assert_eq!(threads_per_rank(2, 64), 1);
        assert_eq!(total_threads(3), 3);
    }
}
