//! Ranks as threads that compute with libtorch on the first GPU.

use fsdp_cuda::CudaMemory;
use fsdp_cuda::torch::Torch;

pub(crate) use crate::card::threads;

/// The memory of a rank.
pub(crate) type RankMemory = Torch<CudaMemory>;

/// The setting of the run file that selects it.
pub(crate) const DEVICE: &str = "run.device=\"cuda\"";
