//! The device under test: the first card.

use std::sync::Arc;

use fsdp_cuda::CudaMemory;

use crate::card;

/// It has its own exponential in double precision.
pub(crate) const EXPONENTIAL_OF_HOST: bool = false;

/// The memory of a test.
pub(crate) fn cuda() -> Arc<CudaMemory> {
    thread_local! {
        static MEMORY: Arc<CudaMemory> = Arc::new(card::device_memory());
    }
    MEMORY.with(Arc::clone)
}
