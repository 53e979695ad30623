//! The device under test: a fake one for every test thread.

use std::sync::Arc;

use fsdp_cuda::{CudaMemory, CudaOptions};

use crate::fake_cuda::{self, FakeDevice};

/// Whether `exp` in f64 gives the bits of the host's; these kernels are compiled for the host.
pub(crate) const EXPONENTIAL_OF_HOST: bool = true;

/// The memory type under test.
pub(crate) type Subject = CudaMemory;

/// Returns the memory of a test: one per thread, each on its own device.
pub(crate) fn subject() -> Arc<Subject> {
    thread_local! {
        static MEMORY: Arc<CudaMemory> = Arc::new(cuda_on(fake_cuda::device()));
    }
    MEMORY.with(Arc::clone)
}

/// Creates a memory on a device, with poisoning.
pub(crate) fn cuda_on(device: FakeDevice) -> CudaMemory {
    let options = CudaOptions { poison: true, ..CudaOptions::new(device.ordinal) };
    CudaMemory::new(options).expect("the fake has devices")
}
