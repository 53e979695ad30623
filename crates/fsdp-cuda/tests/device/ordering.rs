//! Checks that events order queues, and that the fake driver exposes missing waits.

use fsdp_core::memory::{Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut};
use fsdp_core::{DType, Queue};
use fsdp_cuda::CudaMemory;
use fsdp_cuda::device::DeviceMemory;

use crate::fake_cuda;
use crate::subject::cuda_on;

const LEN: usize = 100;

/// Copies numbers through four queues in a chain, and returns the result.
fn relay(memory: &CudaMemory, in_order: bool, round: f32) -> Vec<f32> {
    let mut buffers: Vec<_> = (0..4)
        .map(|_| {
            let mut buffer = memory.allocate(Category::Unsharded, DType::F32, LEN).unwrap();
            memory.zero(Queue::Compute, SliceMut::whole(&mut buffer)).unwrap();
            buffer
        })
        .collect();
    let mut last = Queue::Compute;
    memory.write(last, HostSlice::F32(&[round; LEN]), SliceMut::whole(&mut buffers[0])).unwrap();
    for (at, queue) in [Queue::Gather, Queue::Reduce, Queue::Download].into_iter().enumerate() {
        if in_order {
            memory.wait(queue, &memory.record(last));
        }
        let (done, todo) = buffers.split_at_mut(at + 1);
        memory.copy(queue, Slice::whole(&done[at]), SliceMut::whole(&mut todo[0])).unwrap();
        last = queue;
    }
    let mut values = vec![0.0; LEN];
    memory.read(last, Slice::whole(&buffers[3]), HostSliceMut::F32(&mut values)).unwrap();
    values
}

#[test]
fn events_order_queues() {
    for seed in 0..50 {
        let memory = cuda_on(fake_cuda::device().seed(seed));
        for round in 1..5 {
            assert_eq!(relay(&memory, true, round as f32), [round as f32; LEN], "seed {seed}");
        }
    }
}

#[test]
fn missing_wait_produces_wrong_values() {
    let wrong = (0..50).filter(|&seed| {
        let memory = cuda_on(fake_cuda::device().seed(seed));
        relay(&memory, false, 1.0) != [1.0; LEN]
    });
    assert!(wrong.count() > 10, "the fake driver runs queues out of order");
}

#[test]
fn reused_storage_waits_for_last_use() {
    for seed in 0..50 {
        let memory = cuda_on(fake_cuda::device().seed(100 + seed));
        let mut kept = memory.allocate(Category::Unsharded, DType::F32, LEN).unwrap();
        // Storage is used on another queue, freed, and reused on the compute queue; then the other way around.
        for (first, second) in [(Queue::Reduce, Queue::Compute), (Queue::Compute, Queue::Gather)] {
            let mut buffer = memory.allocate(Category::Activation, DType::F32, LEN).unwrap();
            memory.write(first, HostSlice::F32(&[1.0; LEN]), SliceMut::whole(&mut buffer)).unwrap();
            memory.copy(first, Slice::whole(&buffer), SliceMut::whole(&mut kept)).unwrap();
            drop(buffer);
            let mut next = memory.allocate(Category::Activation, DType::F32, LEN).unwrap();
            memory.write(second, HostSlice::F32(&[2.0; LEN]), SliceMut::whole(&mut next)).unwrap();
            let mut values = [0.0; LEN];
            memory.read(second, Slice::whole(&next), HostSliceMut::F32(&mut values)).unwrap();
            assert_eq!(values, [2.0; LEN], "seed {seed}: the last write is the later one's");
            memory.read(first, Slice::whole(&kept), HostSliceMut::F32(&mut values)).unwrap();
            assert_eq!(values, [1.0; LEN], "seed {seed}: a copy was made before the storage was used again");
        }
    }
}

#[test]
fn event_completion_can_be_polled() {
    let memory = cuda_on(fake_cuda::device());
    let mut buffer = memory.allocate(Category::Unsharded, DType::F32, LEN).unwrap();
    memory.zero(Queue::Gather, SliceMut::whole(&mut buffer)).unwrap();
    let event = memory.record(Queue::Gather);
    let mut asked = 0;
    while !memory.is_complete(&event).unwrap() {
        asked += 1;
        assert!(asked < 100, "it happens at last");
    }
    assert_ne!(memory.stream(Queue::Gather), memory.stream(Queue::Compute));
    assert_ne!(memory.pointer(Queue::Gather, Slice::whole(&buffer)).unwrap(), 0);
    memory.bind().unwrap();
}

#[test]
fn timed_events_measure_positive_duration() {
    let memory = cuda_on(fake_cuda::device());
    let first = memory.record_timed(Queue::Compute).unwrap();
    let mut buffer = memory.allocate(Category::Unsharded, DType::F32, LEN).unwrap();
    memory.zero(Queue::Compute, SliceMut::whole(&mut buffer)).unwrap();
    let second = memory.record_timed(Queue::Compute).unwrap();
    assert!(second.milliseconds_since(&first).unwrap() > 0.0);
}

#[test]
fn collective_queues_have_higher_priority() {
    let memory = cuda_on(fake_cuda::device());
    for queue in Queue::ALL {
        let is_collective = matches!(queue, Queue::Gather | Queue::Reduce);
        let priority = fake_cuda::priority(memory.stream(queue));
        assert_eq!(priority, if is_collective { -5 } else { 0 }, "{queue:?}");
    }
}
