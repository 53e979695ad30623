//! Launchers of ranks on GPUs: one GPU each with NCCL, or all on the first one.

use std::sync::Arc;
use std::time::Duration;

use fsdp_core::Rank;
use fsdp_cuda::device::gpu_count;
use fsdp_cuda::nccl::{GpuOptions, Gpus, Nccl, TooManyRanks};
use fsdp_cuda::torch::{
    Kernels, Torch, library_folders, load_cuda, set_deterministic, set_intra_op, start_cuda,
};
use fsdp_cuda::{CudaMemory, CudaOptions, DeviceError, load_compiler};
use fsdp_sim::{Threads, WorldOptions};
use fsdp_train::config::RunConfig;

use crate::device::Work;
use crate::error::CliError;
use crate::host::{self, threads_per_rank, total_threads};
use crate::torch;

/// Does work with ranks on GPUs; with `poison`, contents that were given up are overwritten.
///
/// # Errors
/// [`CliError`]: something of the device is not there, or there are more ranks than GPUs.
pub(crate) fn on<W: Work>(run: &RunConfig, poison: bool, work: W) -> Result<W::Outcome, CliError> {
    let devices = gpu_count()?;
    if devices == 0 {
        return Err(DeviceError::NoDevice { device: 0, count: 0 }.into());
    }
    if !run.share_gpu && run.ranks > devices {
        return Err(TooManyRanks { ranks: run.ranks, devices }.into());
    }
    let folders = library_folders();
    load_compiler(&folders)?;
    let nccl = if run.share_gpu { None } else { Some(Nccl::open(&folders)?) };
    load_cuda("libtorch_cuda.so")?;
    start_cuda()?;
    set_deterministic(run.deterministic)?;
    let threads = threads_per_rank(total_threads(run.threads), run.ranks);
    set_intra_op(threads);
    let options = move |device| CudaOptions { device, threads, poison };
    let kernels = torch::kernels(run);
    let Some(nccl) = nccl else {
        // Whether it can be used at all is better known before ranks start.
        CudaMemory::new(options(0))?;
        let stack_bytes = GpuOptions::STACK_BYTES;
        let world = WorldOptions { stack_bytes, ..host::world_options(run, false) };
        let launcher = Threads::new(world, move |_: Rank, _| memory(options(0), kernels));
        return Ok(work.on(&launcher));
    };
    let timeout = Duration::from_secs_f64(run.timeout_s);
    let gpus = GpuOptions { timeout, ..GpuOptions::new(devices) };
    let launcher = Gpus::new(nccl, gpus, move |rank: Rank, _| memory(options(rank.0), kernels));
    Ok(work.on(&launcher))
}

fn memory(options: CudaOptions, kernels: Kernels) -> Result<Arc<Torch<CudaMemory>>, fsdp_core::Error> {
    Ok(Arc::new(Torch::new(Arc::new(CudaMemory::new(options)?), kernels)))
}
