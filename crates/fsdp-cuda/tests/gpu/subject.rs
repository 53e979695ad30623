//! The device under test: the first GPU.

use std::sync::Arc;

use fsdp_cuda::CudaMemory;

use crate::card;

/// Whether `exp` in f64 gives the bits of the host's; the GPU has its own.
pub(crate) const EXPONENTIAL_OF_HOST: bool = false;

/// The memory type under test.
pub(crate) type Subject = CudaMemory;

/// Returns the memory of a test: one per thread.
pub(crate) fn subject() -> Arc<Subject> {
    thread_local! {
        static MEMORY: Arc<CudaMemory> = Arc::new(card::device_memory());
    }
    MEMORY.with(Arc::clone)
}
