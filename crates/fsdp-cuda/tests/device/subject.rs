//! The device under test: a stand-in, a new one for every thread of tests.

use std::sync::Arc;

use fsdp_cuda::{CudaMemory, CudaOptions};

use crate::fake_cuda::{self, FakeDevice};

/// Its kernels are compiled for the host.
pub(crate) const EXPONENTIAL_OF_HOST: bool = true;

/// What is tested.
pub(crate) type Subject = CudaMemory;

/// The memory of a test, on a device of its own.
pub(crate) fn subject() -> Arc<Subject> {
    thread_local! {
        static MEMORY: Arc<CudaMemory> = Arc::new(cuda_on(fake_cuda::device()));
    }
    MEMORY.with(Arc::clone)
}

/// A memory on a device.
pub(crate) fn cuda_on(device: FakeDevice) -> CudaMemory {
    let options = CudaOptions { poison: true, ..CudaOptions::new(device.ordinal) };
    CudaMemory::new(options).expect("the fake has devices")
}
