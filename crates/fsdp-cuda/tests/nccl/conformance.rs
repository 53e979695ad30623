//! Runs the conformance suite of all communicators.

use std::sync::Arc;

use fsdp_comm::conformance;
use fsdp_cuda::nccl::{GpuOptions, Gpus};

use crate::fake::Fake;
use crate::memory::StreamMemory;

#[test]
fn conformance_suite_passes_on_streams() {
    let fake = Fake::new();
    let gpus = Gpus::new(fake.nccl.clone(), GpuOptions::new(8), |_, _| Ok(Arc::new(StreamMemory::default())));
    conformance::all(&gpus, &[1, 2, 3, 5]);
    fake.assert_clean();
}
