//! The memory under test: libtorch's operations on the first GPU.

use std::sync::Arc;

use fsdp_cuda::CudaMemory;
use fsdp_cuda::torch::{Kernels, Torch};

use crate::card;

/// The memory type under test.
pub(crate) type Subject = Torch<CudaMemory>;

/// Returns the memory of a test: one per thread.
pub(crate) fn subject() -> Arc<Subject> {
    thread_local! {
        static MEMORY: Arc<Subject> = Arc::new(card::memory(Kernels::Aten));
    }
    MEMORY.with(Arc::clone)
}
