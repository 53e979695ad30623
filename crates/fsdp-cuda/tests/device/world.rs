//! Runs the conformance suite of communicators with several ranks on one device, which move data on their own streams.

use std::sync::Arc;

use fsdp_comm::conformance;
use fsdp_cuda::{CudaMemory, CudaOptions};
use fsdp_sim::{ThreadOptions, Threads};

use crate::fake_cuda;

fn worlds(seed: u64, share_unsharded: bool) -> Threads<CudaMemory> {
    let device = fake_cuda::device().seed(seed);
    let options = ThreadOptions { share_unsharded, ..ThreadOptions::default() };
    let options_of_memory = CudaOptions { poison: true, ..CudaOptions::new(device.ordinal) };
    Threads::new(options, move |_, _| Ok(Arc::new(CudaMemory::new(options_of_memory)?)))
}

#[test]
fn ranks_sharing_device_pass_conformance_suite() {
    for seed in 1..4 {
        conformance::all(&worlds(seed, false), &[1, 2, 3, 4]);
    }
}

#[test]
fn ranks_sharing_storage_pass_conformance_suite() {
    for seed in 11..13 {
        conformance::all(&worlds(seed, true), &[1, 2, 5]);
    }
}
