//! Ranks as threads that compute with libtorch on the host.

use std::sync::Arc;
use std::time::Duration;

use fsdp_core::Error;
use fsdp_cuda::torch::{Kernels, Torch, set_intra_op};
use fsdp_nn::{HostMemory, HostOptions};
use fsdp_sim::{ThreadOptions, Threads};

/// The memory of a rank.
pub(crate) type RankMemory = Torch<HostMemory>;

/// The setting of the run file that selects it.
pub(crate) const DEVICE: &str = "run.device=\"torch-cpu\"";

/// Launches ranks as threads over poisoned memory, with one libtorch thread each.
pub(crate) fn threads(kernels: Kernels) -> Threads<RankMemory> {
    set_intra_op(1);
    let options = ThreadOptions { timeout: Duration::from_secs(600), ..ThreadOptions::default() };
    Threads::new(options, move |_, _| memory(kernels).map(Arc::new))
}

/// Creates the memory of one rank.
pub(crate) fn memory(kernels: Kernels) -> Result<RankMemory, Error> {
    let options = HostOptions { poison: true, resident: true, ..HostOptions::default() };
    Ok(Torch::new(Arc::new(HostMemory::new(options)?), kernels))
}
