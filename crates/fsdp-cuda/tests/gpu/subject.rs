//! The device under test: the first card.

use std::sync::Arc;

use fsdp_cuda::CudaMemory;

use crate::card;

/// It has its own exponential in double precision.
pub(crate) const EXPONENTIAL_OF_HOST: bool = false;

/// What is tested.
pub(crate) type Subject = CudaMemory;

/// The memory of a test.
pub(crate) fn subject() -> Arc<Subject> {
    thread_local! {
        static MEMORY: Arc<CudaMemory> = Arc::new(card::device_memory());
    }
    MEMORY.with(Arc::clone)
}
