//! Failures of a device and their error messages.

use std::sync::Mutex;

use fsdp_core::memory::{Category, HostSlice, Memory, Slice, SliceMut};
use fsdp_core::program::GradientTarget;
use fsdp_core::{DType, Error, Queue};
use fsdp_cuda::device::{ask_when_full, give_back, is_scarce};
use fsdp_cuda::{CudaBuffer, CudaMemory, CudaOptions};
use fsdp_nn::conformance::Calls;

use crate::fake_cuda;
use crate::subject::cuda_on;
use crate::values::{filled, normal, range};

#[test]
fn nonexistent_device_is_rejected() {
    fake_cuda::device();
    let error = CudaMemory::new(CudaOptions::new(100_000)).unwrap_err().to_string();
    assert!(error.contains("no GPU 100000") && error.contains("CUDA_VISIBLE_DEVICES"), "{error}");
}

#[test]
fn full_device_error_lists_memory_by_category() {
    let memory = cuda_on(fake_cuda::device().capacity(1 << 20));
    let _shard = memory.allocate(Category::ParameterShard, DType::F32, 100_000).unwrap();
    let mut x = memory.allocate(Category::Activation, DType::F32, 200_000).unwrap();
    let error = memory.zero(Queue::Compute, SliceMut::whole(&mut x)).unwrap_err();
    assert!(matches!(&error, Error::OutOfMemory(full) if full.category == Category::Activation), "{error:?}");
    let message = error.to_string();
    for part in ["781.5 KiB of device memory", "1.0 MiB are free", "parameter shards 390.6 KiB"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    let error = memory.allocate(Category::OptimizerState, DType::F32, 200_000).unwrap_err().to_string();
    assert!(error.contains("for optimizer state"), "{error}");
}

#[test]
fn kernel_workspace_out_of_memory_lists_usage() {
    const WIDTH: usize = 50_000;
    let memory = cuda_on(fake_cuda::device().capacity(1 << 20));
    let x = filled(&memory, DType::F32, &normal(1, WIDTH));
    let (weight, rstd) =
        (filled(&memory, DType::F32, &normal(2, WIDTH)), filled(&memory, DType::F32, &[1.0]));
    let (mut dx, mut dweight) =
        (filled(&memory, DType::F32, &normal(3, WIDTH)), filled(&memory, DType::F32, &normal(4, WIDTH)));
    let _rest = filled(&memory, DType::F32, &normal(5, WIDTH));
    let [input, weight, rstd] = [&x, &weight, &rstd].map(Slice::whole);
    let dx = SliceMut::whole(&mut dx);
    let target = GradientTarget { slice: SliceMut::whole(&mut dweight), accumulate: false };
    let error = memory
        .rms_norm_backward((WIDTH, 0.0), input, weight, rstd, input, dx, false, Some(target))
        .unwrap_err();
    assert!(matches!(&error, Error::OutOfMemory(full) if full.category == Category::Workspace), "{error:?}");
    assert!(error.to_string().contains("activations 976.6 KiB"), "{error}");
}

#[test]
fn unused_storage_is_freed_before_out_of_memory() {
    let memory = cuda_on(fake_cuda::device().capacity(1 << 20));
    drop(filled(&memory, DType::F32, &normal(1, 150_000)));
    let mut x = memory.allocate(Category::Activation, DType::F32, 200_000).unwrap();
    memory.zero(Queue::Compute, SliceMut::whole(&mut x)).unwrap();
}

#[test]
fn full_device_reclaims_unused_storage_of_other_memory() {
    let device = fake_cuda::device().capacity(1 << 20);
    let (first, second) = (cuda_on(device), cuda_on(device));
    drop(filled(&first, DType::F32, &normal(1, 150_000)));
    let mut x = second.allocate(Category::Activation, DType::F32, 200_000).unwrap();
    second.zero(Queue::Compute, SliceMut::whole(&mut x)).unwrap();
}

#[test]
fn give_back_frees_only_unused_storage() {
    let device = fake_cuda::device().capacity(1 << 20);
    let memory = cuda_on(device);
    let used = filled(&memory, DType::F32, &normal(1, 10_000));
    let free = || memory.free_and_total_bytes().unwrap().0;
    let before = free();
    drop(filled(&memory, DType::F32, &normal(1, 230_000)));
    assert!(free() < before && is_scarce(device.ordinal, 8), "it is kept for the next user");
    assert!(give_back(device.ordinal) && !is_scarce(device.ordinal, 8));
    assert_eq!(free(), before);
    assert!(!give_back(device.ordinal), "what is in use stays");
    assert_eq!(range(&memory, &used, 0, 1).len(), 1);
}

/// Memory that a neighbor holds on the device of a test, and drops when asked.
static KEPT: Mutex<Option<(usize, CudaMemory, CudaBuffer)>> = Mutex::new(None);

fn drop_what_is_kept(device: usize) -> bool {
    let mut kept = KEPT.lock().unwrap();
    kept.take_if(|(of, ..)| *of == device).is_some()
}

#[test]
fn full_device_reclaims_own_storage_before_asking_others() {
    let device = fake_cuda::device().capacity(1 << 20);
    let (memory, neighbor) = (cuda_on(device), cuda_on(device));
    let buffer = filled(&neighbor, DType::F32, &normal(1, 150_000));
    *KEPT.lock().unwrap() = Some((device.ordinal, neighbor, buffer));
    ask_when_full(drop_what_is_kept);
    drop(filled(&memory, DType::F32, &normal(1, 100_000)));
    let fits = filled(&memory, DType::F32, &normal(1, 110_000));
    assert!(KEPT.lock().unwrap().is_some(), "own unused storage was enough");
    drop(fits);
    let mut x = memory.allocate(Category::Activation, DType::F32, 200_000).unwrap();
    memory.zero(Queue::Compute, SliceMut::whole(&mut x)).unwrap();
    assert!(KEPT.lock().unwrap().is_none());
}

#[test]
fn failed_pinned_allocation_is_out_of_memory_error() {
    let device = fake_cuda::device();
    let memory = cuda_on(device);
    let _shard = memory.allocate_host(Category::ParameterShard, DType::F32, 2048).unwrap();
    device.fail("cuMemHostAlloc", 0, 2);
    let error = memory.allocate_host(Category::OptimizerState, DType::F32, 1000).unwrap_err();
    assert!(
        matches!(&error, Error::OutOfMemory(full) if full.category == Category::OptimizerState),
        "{error:?}"
    );
    let message = error.to_string();
    for part in ["3.9 KiB of pinned host memory", "parameter shards 8.0 KiB", "ulimit -l"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    assert!(!message.contains("GPU"), "free memory of the device says nothing here: {message}");
}

#[test]
fn failed_staging_ring_allocation_is_out_of_memory_error() {
    let device = fake_cuda::device();
    let memory = cuda_on(device);
    let mut x = memory.allocate(Category::Activation, DType::F32, 1).unwrap();
    device.fail("cuMemHostAlloc", 0, 2);
    let error = memory.write(Queue::Compute, HostSlice::F32(&[2.0]), SliceMut::whole(&mut x)).unwrap_err();
    assert!(
        matches!(&error, Error::OutOfMemory(full) if full.category == Category::HostStaging),
        "{error:?}"
    );
    assert!(error.to_string().contains("4.0 MiB of pinned host memory"), "{error}");
}

#[test]
fn failed_driver_call_error_names_call_and_device() {
    let device = fake_cuda::device();
    let memory = cuda_on(device);
    let x = filled(&memory, DType::F32, &[1.0; 10]);
    let mut y = memory.allocate(Category::Activation, DType::F64, 10).unwrap();
    device.fail("cuLaunchKernel", 0, 700);
    let error = memory.copy(Queue::Compute, Slice::whole(&x), SliceMut::whole(&mut y)).unwrap_err();
    assert!(matches!(error, Error::Device(_)), "it is not about memory: {error:?}");
    let error = error.to_string();
    let place = format!("cuLaunchKernel failed on GPU {}", device.ordinal);
    assert!(error.contains(&place), "{error}");
    assert!(error.contains("CUDA_ERROR_ILLEGAL_ADDRESS") && error.contains("last checkpoint"), "{error}");
}

#[test]
fn module_load_out_of_memory_suggests_nvidia_smi() {
    let device = fake_cuda::device();
    let memory = cuda_on(device);
    let x = filled(&memory, DType::F32, &[1.0; 10]);
    let mut y = memory.allocate(Category::Activation, DType::F64, 10).unwrap();
    device.fail("cuModuleLoadData", 0, 2);
    let error = memory.copy(Queue::Compute, Slice::whole(&x), SliceMut::whole(&mut y)).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("cuModuleLoadData") && error.contains("nvidia-smi"), "{error}");
}

#[test]
fn deferred_failure_is_returned_by_next_call() {
    let device = fake_cuda::device();
    let memory = cuda_on(device);
    let mut x = filled(&memory, DType::F32, &[1.0]);
    device.fail("cuEventRecord", 0, 1);
    let event = memory.record(Queue::Compute);
    memory.wait(Queue::Gather, &event);
    let error = memory.write(Queue::Compute, HostSlice::F32(&[2.0]), SliceMut::whole(&mut x)).unwrap_err();
    assert!(error.to_string().contains("cuEventRecord"), "{error}");
}
