//! Launchers of ranks on GPUs: one GPU each with NCCL, or all on the first one.

use std::collections::BTreeMap;
use std::env;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use fsdp_comm::process::cluster::{Cluster, host};
use fsdp_config::RunConfig;
use fsdp_core::Rank;
use fsdp_cuda::device::{TooManyRanks, gpu_count, gpu_uuid, gpus_of_process};
use fsdp_cuda::nccl::{GpuOptions, Gpus, Nccl, Peers};
use fsdp_cuda::torch::{
    Kernels, Torch, library_folders, load_cuda, set_deterministic, set_intra_op, start_cuda,
};
use fsdp_cuda::{CudaMemory, CudaOptions, DeviceError, load_compiler};
use fsdp_sim::{ThreadOptions, Threads};

use super::host::{self as on_host, threads_per_rank, total_threads};
use super::together::Together;
use super::torch;
use super::work::{Purpose, Work};
use crate::cluster::{decide, has_nccl, refused};
use crate::error::CliError;

/// The topic on which processes announce their GPUs.
const TOPIC: &str = "gpus";

/// Runs work on ranks on GPUs. To be compared with the oracle, libtorch must use deterministic algorithms.
///
/// # Errors
/// [`CliError`]: a part of the device is missing, or there are more ranks than GPUs.
pub(crate) fn on<W: Work>(run: &RunConfig, purpose: Purpose, work: W) -> Result<W::Outcome, CliError> {
    let devices = count()?;
    if !run.share_gpu && run.ranks > devices {
        return Err(TooManyRanks { ranks: run.ranks, devices }.into());
    }
    let nccl = open(!run.share_gpu)?;
    let (threads, poison) = (start(run, purpose, run.ranks)?, purpose.poison());
    let options = move |device| CudaOptions { device, threads, poison };
    let kernels = torch::kernels(run);
    let Some(nccl) = nccl else {
        // Check that the GPU is usable before ranks start.
        CudaMemory::new(options(0))?;
        let stack_bytes = GpuOptions::STACK_BYTES;
        let world = ThreadOptions { stack_bytes, ..on_host::world_options(run, false) };
        let launcher = Threads::new(world, move |_: Rank, _| memory(options(0), kernels));
        return Ok(work.on(&launcher));
    };
    let launcher =
        Gpus::new(nccl, gpu_options(run, devices), move |rank: Rank, _| memory(options(rank.0), kernels));
    Ok(work.on(&launcher))
}

/// Runs work on the ranks of this process, one of several, on GPUs; an oracle's rank is on the first GPU of each
/// process.
///
/// # Errors
/// [`CliError`]: a part of the device is missing, or ranks have no GPU of their own.
pub(crate) fn among<W: Work>(
    run: &RunConfig,
    purpose: Purpose,
    cluster: &Cluster,
    work: W,
) -> Result<W::Outcome, CliError> {
    let gpus = process_gpus(run, cluster)?;
    let nccl = open(has_nccl(run))?;
    let (threads, poison) = (start(run, purpose, cluster.ranks_on_machine())?, purpose.poison());
    let (first_rank, kernels) = (cluster.assembly().local().start, torch::kernels(run));
    let count = gpus.len();
    let on_gpu = move |device| memory(CudaOptions { device, threads, poison }, kernels);
    let first_gpu = gpus.start;
    let stack_bytes = GpuOptions::STACK_BYTES;
    let single_rank_run = RunConfig { ranks: 1, ..run.clone() };
    let world = ThreadOptions { stack_bytes, ..on_host::world_options(&single_rank_run, false) };
    let oracle = Threads::new(world, move |_: Rank, _| on_gpu(first_gpu));
    let make_memory = move |rank: Rank, _: usize| {
        on_gpu(if count == 1 { first_gpu } else { first_gpu + rank.0 - first_rank })
    };
    let Some(nccl) = nccl else {
        return Ok(work.on(&Together::new(oracle, cluster.processes(make_memory))));
    };
    let peers = Peers {
        assembly: cluster.assembly(),
        alarm: cluster.alarm(),
        recorder: cluster.recorder(),
        ranks_on_machine: cluster.ranks_on_machine(),
        heartbeat: Duration::from_secs_f64(run.heartbeat_s),
    };
    let gpus = Gpus::new(nccl, gpu_options(run, count), make_memory).among(peers);
    Ok(work.on(&Together::new(oracle, gpus)))
}

fn count() -> Result<usize, CliError> {
    match gpu_count()? {
        0 => Err(DeviceError::NoDevice { device: 0, count: 0 }.into()),
        devices => Ok(devices),
    }
}

fn gpu_options(run: &RunConfig, devices: usize) -> GpuOptions {
    GpuOptions { timeout: Duration::from_secs_f64(run.timeout_s), ..GpuOptions::new(devices) }
}

/// Loads the kernel compiler, and NCCL if needed.
fn open(needs_nccl: bool) -> Result<Option<Arc<Nccl>>, CliError> {
    let folders = library_folders();
    load_compiler(&folders)?;
    Ok(if needs_nccl { Some(Nccl::open(&folders)?) } else { None })
}

/// Starts libtorch and applies per-process settings; returns the host threads per rank, for `ranks` ranks on this
/// machine.
fn start(run: &RunConfig, purpose: Purpose, ranks: usize) -> Result<usize, CliError> {
    load_cuda("libtorch_cuda.so")?;
    start_cuda()?;
    set_deterministic(run.deterministic || purpose != Purpose::Training)?;
    let threads = threads_per_rank(total_threads(run.threads), ranks);
    set_intra_op(threads);
    Ok(threads)
}

/// The GPUs of this process's ranks, used by no other process; or the one that all ranks share.
fn process_gpus(run: &RunConfig, cluster: &Cluster) -> Result<Range<usize>, CliError> {
    let devices = count()?;
    if run.share_gpu {
        return Ok(0..1);
    }
    let (place, ranks) = (cluster.place(), cluster.assembly().local());
    let is_selected = env::var_os("CUDA_VISIBLE_DEVICES").is_some();
    let processes = (place.local_process, place.local_processes);
    let gpus = gpus_of_process(devices, ranks.len(), processes, is_selected)?;
    let names: Result<Vec<String>, CliError> =
        gpus.clone().map(|number| Ok(format!("{} of host {}", gpu_uuid(number)?, host()))).collect();
    let names = names?;
    match decide(cluster, run, TOPIC, &|rank| names[rank.0 - ranks.start].clone(), &shared_gpu)? {
        Some(why) => Err(refused(why)),
        None => Ok(gpus),
    }
}

/// Names two ranks that would have the same GPU, if any.
fn shared_gpu(names: &[String]) -> Option<String> {
    let mut owners = BTreeMap::new();
    names.iter().enumerate().find_map(|(rank, name)| {
        let owner = owners.insert(name, Rank(rank))?;
        Some(format!(
            "{owner} and {} would both use {name}: let each process see only its own GPUs (CUDA_VISIBLE_DEVICES), or \
             all GPUs of the node; only with run.share_gpu = true and \"tcp\" can ranks share one",
            Rank(rank)
        ))
    })
}

fn memory(options: CudaOptions, kernels: Kernels) -> Result<Arc<Torch<CudaMemory>>, fsdp_core::Error> {
    Ok(Arc::new(Torch::new(Arc::new(CudaMemory::new(options)?), kernels)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_sharing_gpu_are_named() {
        let names = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(shared_gpu(&names(&["a of host n0", "b of host n0", "a of host n1"])), None);
        let why = shared_gpu(&names(&["a of host n0", "b of host n0", "b of host n0"])).unwrap();
        assert!(why.starts_with("rank 1 and rank 2 would both use b of host n0: "), "{why}");
    }
}
