//! Launchers of ranks as threads on the host.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use fsdp_comm::process::cluster::Cluster;
use fsdp_config::RunConfig;
use fsdp_core::{Error, Rank};
use fsdp_nn::{HostMemory, HostOptions, HostPool};
use fsdp_sim::{ThreadOptions, Threads};

use super::together::{OnHost, Together};
use super::work::Purpose;

/// The ranks of this process.
pub(crate) fn ranks(run: &RunConfig, purpose: Purpose) -> Threads<HostMemory> {
    let (total, pool) = (total_threads(run.threads), HostPool::new());
    Threads::new(world_options(run, purpose == Purpose::Training), move |_: Rank, world| {
        memory(purpose.options(&pool, threads_per_rank(total, world)))
    })
}

/// The ranks of this process, one of several: each has its own storage, and its share of the machine's cores; and the
/// oracle.
pub(crate) fn processes(run: &RunConfig, purpose: Purpose, cluster: &Cluster) -> OnHost<HostMemory> {
    let threads = threads_per_rank(total_threads(run.threads), cluster.ranks_on_machine());
    let processes = cluster.processes(move |_: Rank, _| memory(purpose.options(&HostPool::new(), threads)));
    Together::new(ranks(&RunConfig { ranks: 1, ..run.clone() }, purpose), processes)
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
