//! Ranks as threads that compute by libtorch on the first card.

use fsdp_cuda::CudaMemory;
use fsdp_cuda::torch::Torch;

pub(crate) use crate::card::threads;

/// The memory of a rank.
pub(crate) type RankMemory = Torch<CudaMemory>;

/// What a run file says of it.
pub(crate) const DEVICE: &str = "run.device=\"cuda\"";
