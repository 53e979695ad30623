//! What buffers and queues promise.

use fsdp_core::memory::{Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut};
use fsdp_core::{DType, Queue};
use fsdp_cuda::{CudaMemory, CudaOptions};

use crate::fake_cuda;

#[test]
fn elements_come_back_as_they_were_written() {
    let device = fake_cuda::device();
    let memory = CudaMemory::new(CudaOptions::new(device.ordinal)).expect("the fake has devices");
    let mut buffer = memory.allocate(Category::Workspace, DType::F32, 1000).unwrap();
    let values: Vec<f32> = (0..1000).map(|i| i as f32 * 0.5).collect();
    memory.write(Queue::Compute, HostSlice::F32(&values), SliceMut::whole(&mut buffer)).unwrap();
    let mut other = memory.allocate(Category::Workspace, DType::Bf16, 1000).unwrap();
    memory.copy(Queue::Compute, Slice::whole(&buffer), SliceMut::whole(&mut other)).unwrap();
    let mut back = vec![0.0; 1000];
    memory.read(Queue::Compute, Slice::whole(&buffer), HostSliceMut::F32(&mut back)).unwrap();
    assert_eq!(back, values);
}
