//! The first GPU, and ranks that share it.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use fsdp_comm::conformance;
use fsdp_core::DType;
use fsdp_core::memory::{Category, Memory};
use fsdp_cuda::nccl::{GpuOptions, Gpus, Nccl};
use fsdp_cuda::torch::{Kernels, Torch, library_folders, load_cuda, set_deterministic, start_cuda};
use fsdp_cuda::{CudaMemory, CudaOptions, load_compiler};
use fsdp_sim::{ThreadOptions, Threads};

/// Loads NVRTC and libtorch's CUDA half once, and returns the folders of libraries.
fn libraries() -> &'static [PathBuf] {
    static FOLDERS: OnceLock<Vec<PathBuf>> = OnceLock::new();
    FOLDERS.get_or_init(|| {
        let folders = library_folders();
        load_compiler(&folders).unwrap_or_else(|error| panic!("{error}"));
        load_cuda("libtorch_cuda.so").and_then(|()| start_cuda()).unwrap_or_else(|error| panic!("{error}"));
        // Bounds on sums over micro-batches do not allow for sums within a micro-batch whose order varies between runs.
        set_deterministic(true).unwrap_or_else(|error| panic!("{error}"));
        folders
    })
}

/// Creates a memory on the first GPU, with poisoning.
pub(crate) fn device_memory() -> CudaMemory {
    libraries();
    let options = CudaOptions { poison: true, ..CudaOptions::new(0) };
    CudaMemory::new(options).unwrap_or_else(|error| panic!("{error}"))
}

/// Creates a memory on the first GPU, with poisoning and libtorch's operations.
pub(crate) fn memory(kernels: Kernels) -> Torch<CudaMemory> {
    Torch::new(Arc::new(device_memory()), kernels)
}

/// Launches ranks that share the GPU.
pub(crate) fn threads(kernels: Kernels) -> Threads<Torch<CudaMemory>> {
    libraries();
    let stack_bytes = GpuOptions::STACK_BYTES;
    let options = ThreadOptions { timeout: Duration::from_secs(60), stack_bytes, ..ThreadOptions::default() };
    Threads::new(options, move |_, _| Ok(Arc::new(memory(kernels))))
}

#[test]
fn nccl_with_one_rank_passes_conformance_suite() {
    let nccl = Nccl::open(libraries()).unwrap_or_else(|error| panic!("{error}"));
    let gpus = Gpus::new(nccl, GpuOptions::new(1), |_, _| Ok(Arc::new(memory(Kernels::Fused))));
    conformance::all(&gpus, &[1]);
}

#[test]
fn full_gpu_error_names_requesting_category() {
    let memory = memory(Kernels::Fused);
    let (_, total) = memory.storage().free_and_total_bytes().unwrap_or_else(|error| panic!("{error}"));
    let error =
        memory.allocate(Category::OptimizerState, DType::F32, total).expect_err("four times the card");
    assert!(error.to_string().contains("optimizer state"), "{error}");
}
