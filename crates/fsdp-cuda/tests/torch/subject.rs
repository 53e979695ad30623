//! The memory under test: libtorch's operations on the host.

use std::sync::Arc;

use fsdp_cuda::torch::{Kernels, Torch};
use fsdp_nn::{HostMemory, HostOptions};

/// The memory type under test.
pub(crate) type Subject = Torch<HostMemory>;

/// Creates the memory of a test.
pub(crate) fn subject() -> Arc<Subject> {
    let options = HostOptions { poison: true, ..HostOptions::default() };
    let memory = HostMemory::new(options).expect("one thread");
    Arc::new(Torch::new(Arc::new(memory), Kernels::Aten))
}
