//! The ranks of a benchmark, on any device, as `fsdp train` has them by default.

use std::error::Error;
use std::sync::Arc;
use std::thread;

use clap::ValueEnum;
use fsdp_comm::launch::Launcher;
use fsdp_core::Rank;
use fsdp_nn::Backend;
use fsdp_nn::{HostMemory, HostOptions, HostPool};
use fsdp_sim::{ThreadOptions, Threads};

use crate::clock::Clock;

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Device {
    /// The kernels of fsdp
    Cpu,
    /// libtorch's kernels (feature `torch`)
    TorchCpu,
    /// NVIDIA GPUs (feature `torch`)
    Cuda,
}

/// What every rank does.
pub(crate) trait Work {
    /// The result.
    type Outcome;

    /// Does the work.
    fn on<L: Launcher>(self, launcher: &L) -> Self::Outcome
    where
        L::Memory: Backend + Clock;
}

/// Runs work on the ranks of a device.
///
/// # Errors
/// A part of the device is missing.
pub(crate) fn run<W: Work>(device: Device, ranks: usize, work: W) -> Result<W::Outcome, Box<dyn Error>> {
    let threads = thread::available_parallelism().map_or(1, usize::from) / ranks;
    let options =
        HostOptions { pool: HostPool::new(), threads: threads.max(1), poison: false, resident: false };
    let world = ThreadOptions { share_unsharded: true, ..ThreadOptions::default() };
    let host = move || Ok(Arc::new(HostMemory::new(options.clone())?));
    match device {
        Device::Cpu => Ok(work.on(&Threads::new(world, move |_: Rank, _| host()))),
        #[cfg(feature = "torch")]
        Device::TorchCpu => {
            torch::start(threads.max(1))?;
            Ok(work.on(&Threads::new(world, move |_: Rank, _| Ok(torch::memory(host()?)))))
        }
        #[cfg(feature = "torch")]
        Device::Cuda => Ok(work.on(&torch::gpus(ranks, threads.max(1))?)),
        #[cfg(not(feature = "torch"))]
        Device::TorchCpu | Device::Cuda => {
            Err("--device: this program was built without --features torch".into())
        }
    }
}

#[cfg(feature = "torch")]
mod torch {
    use fsdp_cuda::device::{TooManyRanks, gpu_count};
    use fsdp_cuda::nccl::{GpuOptions, Gpus, Nccl};
    use fsdp_cuda::torch::{
        Kernels, Torch, TorchStorage, check_version, library_folders, load_cuda, set_intra_op, start_cuda,
    };
    use fsdp_cuda::{CudaMemory, CudaOptions, load_compiler};

    use super::{Arc, Error, Rank};

    /// Checks libtorch, and has its operations use a rank's threads.
    pub(super) fn start(threads: usize) -> Result<(), Box<dyn Error>> {
        check_version()?;
        set_intra_op(threads);
        Ok(())
    }

    pub(super) fn memory<M: TorchStorage>(storage: Arc<M>) -> Arc<Torch<M>> {
        Arc::new(Torch::new(storage, Kernels::Fused))
    }

    /// Ranks with a GPU each.
    pub(super) fn gpus(ranks: usize, threads: usize) -> Result<Gpus<Torch<CudaMemory>>, Box<dyn Error>> {
        let devices = gpu_count()?;
        if ranks > devices {
            return Err(TooManyRanks { ranks, devices }.into());
        }
        let folders = library_folders();
        load_compiler(&folders)?;
        let nccl = Nccl::open(&folders)?;
        load_cuda("libtorch_cuda.so")?;
        start_cuda()?;
        start(threads)?;
        Ok(Gpus::new(nccl, GpuOptions::new(devices), move |rank: Rank, _| {
            Ok(memory(Arc::new(CudaMemory::new(CudaOptions { device: rank.0, threads, poison: false })?)))
        }))
    }
}
