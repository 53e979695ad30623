//! What is tested: libtorch's operations on the first card.

use std::sync::Arc;

use fsdp_cuda::CudaMemory;
use fsdp_cuda::torch::{Kernels, Torch};

use crate::card;

/// What is tested.
pub(crate) type Subject = Torch<CudaMemory>;

/// The memory of a test.
pub(crate) fn subject() -> Arc<Subject> {
    thread_local! {
        static MEMORY: Arc<Subject> = Arc::new(card::memory(Kernels::Aten));
    }
    MEMORY.with(Arc::clone)
}
