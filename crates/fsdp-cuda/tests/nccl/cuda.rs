//! The suite on CUDA memory: the real memory and the real communicator, over stand-ins for the driver and for NCCL.
//!
//! The stand-in for the driver does work when it is forced to, so the one for NCCL can not append to its streams. It
//! forces what came before an operation, and says that the operation is in progress until it is done: calls wait for all
//! ranks, as the first ones of every communicator do on real devices. So all checks are run but the one whose
//! ranks call in different orders.
#![expect(unsafe_code, reason = "it finds a C function of the stand-in")]

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use fsdp_comm::conformance;
use fsdp_core::DType;
use fsdp_cuda::nccl::{GpuOptions, Gpus};
use fsdp_cuda::{CudaMemory, CudaOptions};
use libloading::os::unix::Library;

use crate::fake::Fake;
use crate::fake_cuda;

type Synchronize = unsafe extern "C" fn(*mut c_void) -> c_int;

/// `cuStreamSynchronize` of the stand-in for the driver, which is loaded when a device of it is taken.
fn synchronize() -> Synchronize {
    // SAFETY: the type is that of cuda.h; the library stays loaded.
    unsafe { *Library::this().get::<Synchronize>(b"cuStreamSynchronize").expect("the driver has it") }
}

#[test]
fn the_suite_passes_on_cuda_memory() {
    let devices = [(); 4].map(|()| fake_cuda::device().ordinal);
    let fake = Fake::beside_streams(synchronize());
    let memory =
        move |rank: fsdp_core::Rank, _| Ok(Arc::new(CudaMemory::new(CudaOptions::new(devices[rank.0]))?));
    let gpus = Gpus::new(fake.nccl.clone(), GpuOptions::new(devices.len()), memory);
    for ranks in [1, 2, 4] {
        for dtype in [DType::F32, DType::F64, DType::Bf16, DType::I64] {
            for lens in [&[3, 0, 5, 1][..], &[64, 129]] {
                conformance::all_gather(&gpus, ranks, dtype, lens);
                conformance::reduce_scatter(&gpus, ranks, dtype, lens);
                conformance::all_reduce(&gpus, ranks, dtype, lens);
                conformance::broadcast(&gpus, ranks, dtype, lens);
            }
        }
        conformance::traffic_matches_formulas(&gpus, ranks);
        conformance::buffers_come_back_to_their_rank(&gpus, ranks);
        conformance::arguments_are_checked(&gpus, ranks);
        conformance::abort_reaches_every_rank(&gpus, ranks);
        conformance::dropping_a_pending_aborts(&gpus, ranks);
        conformance::divergent_calls_are_reported(&gpus, ranks);
        conformance::divergent_roots_are_reported(&gpus, ranks);
        conformance::many_in_flight(&gpus, ranks);
        conformance::groups_of_groups(&gpus, ranks);
        conformance::rows_and_columns_of_a_mesh(&gpus, ranks.div_ceil(2), ranks.min(2));
    }
    fake.assert_clean();
}
