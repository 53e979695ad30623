//! Runs the conformance suite on the real CUDA memory and communicator, over a fake driver and a fake NCCL.
//!
//! Storage is poisoned, and the driver runs streams in random orders that respect only events.
//!
//! The fake driver runs work only when forced, so the fake NCCL cannot append to its streams. Instead, the fake NCCL
//! forces the work before an operation, and reports the operation as in progress until it is done: calls wait for all
//! ranks, as the first calls of a communicator do on real devices. All checks are therefore run except the one whose
//! ranks call in different orders.
#![expect(unsafe_code, reason = "it finds a C function of the stand-in")]

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use fsdp_comm::conformance;
use fsdp_comm::launch::{Launcher, Seat};
use fsdp_core::comm::Purpose;
use fsdp_core::memory::{Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut};
use fsdp_core::wrap::UnitId;
use fsdp_core::{DType, Error, Queue, Rank};
use fsdp_cuda::nccl::{GpuOptions, Gpus};
use fsdp_cuda::{CudaMemory, CudaOptions};
use libloading::os::unix::Library;

use crate::fake::Fake;
use crate::fake_cuda::{self, FakeDevice};

pub(crate) type Synchronize = unsafe extern "C" fn(*mut c_void) -> c_int;

/// Returns `cuStreamSynchronize` of the fake driver, which must be loaded: taking a fake device loads it.
pub(crate) fn synchronize() -> Synchronize {
    // SAFETY: the type matches cuda.h, and the library stays loaded.
    unsafe { *Library::this().get::<Synchronize>(b"cuStreamSynchronize").expect("the driver has it") }
}

/// Launches ranks, each on its own device.
fn gpus<const RANKS: usize>(fake: &Fake, devices: [FakeDevice; RANKS]) -> Gpus<CudaMemory> {
    let memory = move |rank: Rank, _| {
        let options = CudaOptions { poison: true, ..CudaOptions::new(devices[rank.0].ordinal) };
        Ok(Arc::new(CudaMemory::new(options)?))
    };
    Gpus::new(fake.nccl.clone(), GpuOptions::new(RANKS), memory)
}

#[test]
fn conformance_suite_passes_on_cuda_memory() {
    let devices = [(); 4].map(|()| fake_cuda::device());
    let fake = Fake::beside_streams(synchronize());
    let gpus = gpus(&fake, devices);
    for ranks in [1, 2, 4] {
        for dtype in [DType::F32, DType::F64, DType::Bf16, DType::F16, DType::I64] {
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

/// Returns the result of an all-gather into storage that an activation has just given up.
fn gather_into_used_storage(mut seat: Seat<CudaMemory>) -> Result<[f32; 2 * LEN], Error> {
    let memory = &*seat.memory;
    let mut own = memory.allocate(Category::CommStaging, DType::F32, LEN)?;
    memory.write(Queue::Gather, HostSlice::F32(&[seat.rank.0 as f32; LEN]), SliceMut::whole(&mut own))?;
    let mut activation = memory.allocate(Category::Activation, DType::F32, 2 * LEN)?;
    memory.zero(Queue::Compute, SliceMut::whole(&mut activation))?;
    drop(activation);
    let full = memory.allocate(Category::Activation, DType::F32, 2 * LEN)?;
    let pending =
        seat.gathers.all_gather(memory, Purpose::Forward, Some(UnitId(0)), vec![own], vec![full])?;
    let gathered = pending.wait_on(memory, Queue::Compute)?.outputs;
    let mut values = [f32::NAN; 2 * LEN];
    memory.read(Queue::Compute, Slice::whole(&gathered[0]), HostSliceMut::F32(&mut values))?;
    Ok(values)
}

const LEN: usize = 100;

#[test]
fn collective_waits_for_previous_use_of_its_storage() {
    let worlds = (0..10).map(|seed| [2 * seed, 2 * seed + 1].map(|seed| fake_cuda::device().seed(seed)));
    let worlds: Vec<[FakeDevice; 2]> = worlds.collect();
    let fake = Fake::beside_streams(synchronize());
    let mut expected = [0.0; 2 * LEN];
    expected[LEN..].fill(1.0);
    for (world, devices) in worlds.into_iter().enumerate() {
        let arrived = gpus(&fake, devices).launch(2, &gather_into_used_storage).unwrap();
        assert!(arrived.iter().all(|values| *values == expected), "world {world}: {arrived:?}");
    }
    fake.assert_clean();
}
