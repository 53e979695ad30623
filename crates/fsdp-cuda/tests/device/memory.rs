//! The guarantees of buffers, on the device and in pinned host memory.

use std::panic::{AssertUnwindSafe, catch_unwind};

use fsdp_core::memory::{
    Arithmetic, Buffer, Category, HostSlice, HostSliceMut, Memory, Rows, Slice, SliceMut, Usage,
};
use fsdp_core::{DType, Error, Queue};
use fsdp_cuda::{CudaBuffer, CudaMemory};

use crate::fake_cuda;
use crate::subject::{cuda_on, subject};
use crate::values::{assert_bits, filled, host, normal, values};

const Q: Queue = Queue::Compute;

fn read(memory: &CudaMemory, buffer: &CudaBuffer) -> Result<Vec<f32>, Error> {
    let mut values = vec![0.0; buffer.len()];
    memory.read(Q, Slice::whole(buffer), HostSliceMut::F32(&mut values))?;
    Ok(values)
}

/// Allocates a buffer in host memory and one in device memory.
fn places(memory: &CudaMemory, category: Category, len: usize) -> [CudaBuffer; 2] {
    [
        memory.allocate_host(category, DType::F32, len).unwrap(),
        memory.allocate(category, DType::F32, len).unwrap(),
    ]
}

#[test]
fn written_elements_read_back_as_on_host() {
    let memory = subject();
    // More than the ring of pinned memory holds, and not a multiple of its parts.
    let numbers = normal(1, (9 << 20) / 4 + 5);
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        let (memory, host) = (&*memory, &host());
        let expected = values(host, &filled(host, dtype, &numbers));
        assert_bits(&values(memory, &filled(memory, dtype, &numbers)), &expected, "written and read");
    }
}

#[test]
fn writes_do_not_wait_for_device() {
    let device = fake_cuda::device();
    let memory = cuda_on(device);
    let mut buffer = memory.allocate(Category::Activation, DType::F32, 1000).unwrap();
    memory.write(Q, HostSlice::F32(&[1.0; 1000]), SliceMut::whole(&mut buffer)).unwrap();
    let waits = |device: fake_cuda::FakeDevice| {
        ["cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"].map(|call| device.calls(call))
    };
    let before = waits(device);
    for _ in 0..100 {
        memory.write(Q, HostSlice::F32(&[1.0; 1000]), SliceMut::whole(&mut buffer)).unwrap();
        memory.wait(Queue::Reduce, &memory.record(Q));
    }
    assert_eq!(waits(device), before);
}

#[test]
fn usage_counts_until_last_handle_is_dropped() {
    let memory = subject();
    let a = memory.allocate(Category::Activation, DType::F32, 10).unwrap();
    let clone = a.clone();
    drop(a);
    assert_eq!(memory.usage().live(Category::Activation), 40);
    let b = memory.allocate_host(Category::Activation, DType::Bf16, 7).unwrap();
    let usage = memory.usage();
    assert_eq!((usage.device.total_peak_bytes, usage.host.total_peak_bytes), (40, 14));
    drop((clone, b));
    let Usage { device, host, .. } = memory.usage();
    assert_eq!([device, host].map(|bytes| bytes.live_bytes), [[0; Category::COUNT]; 2]);
}

#[test]
fn write_to_shared_buffer_is_rejected() {
    let memory = subject();
    for mut buffer in places(&memory, Category::Unsharded, 4) {
        assert!(buffer.is_exclusive());
        let clone = buffer.clone();
        assert!(!buffer.is_exclusive(), "a clone counts before there are contents");
        let write = memory.zero(Q, SliceMut::whole(&mut buffer));
        assert!(matches!(write, Err(Error::Shared { readers: 1, .. })));
        drop(clone);
        memory.zero(Q, SliceMut::whole(&mut buffer)).unwrap();
        let _late = buffer.clone();
        assert!(matches!(memory.zero(Q, SliceMut::whole(&mut buffer)), Err(Error::Shared { .. })));
    }
}

#[test]
fn contents_are_readable_only_from_first_write_to_release() {
    let memory = subject();
    for category in [Category::Activation, Category::Unsharded] {
        for mut buffer in places(&memory, category, 2) {
            let live = memory.usage().live(category);
            assert!(matches!(read(&memory, &buffer), Err(Error::Released { .. })));
            memory.write(Q, HostSlice::F32(&[1.0, 2.0]), SliceMut::whole(&mut buffer)).unwrap();
            assert_eq!(read(&memory, &buffer).unwrap(), [1.0, 2.0]);
            memory.release(Q, &mut buffer);
            assert!(matches!(read(&memory, &buffer), Err(Error::Released { .. })));
            assert_eq!(memory.usage().live(category), live, "a released buffer stays counted");
            memory.write(Q, HostSlice::F32(&[5.0]), SliceMut::new(&mut buffer, 0, 1)).unwrap();
            let values = read(&memory, &buffer).unwrap();
            assert!(values[0] == 5.0 && values[1].is_nan(), "what is not written again is poisoned");
        }
    }
}

#[test]
fn alias_shares_storage_until_released() {
    let memory = subject();
    for category in [Category::Activation, Category::Unsharded] {
        let [sources, readers] = [places(&memory, category, 2), places(&memory, Category::Unsharded, 2)];
        for (mut src, mut dst) in sources.into_iter().zip(readers) {
            assert!(!memory.alias(&mut dst, &src), "there is nothing to read yet");
            memory.write(Q, HostSlice::F32(&[1.0, 2.0]), SliceMut::whole(&mut src)).unwrap();
            assert!(memory.alias(&mut dst, &src));
            assert_eq!(read(&memory, &dst).unwrap(), [1.0, 2.0]);
            assert!(src.is_exclusive() && dst.is_exclusive(), "an alias is a buffer of its own");
            assert!(matches!(memory.zero(Q, SliceMut::whole(&mut src)), Err(Error::Shared { .. })));
            memory.release(Q, &mut dst);
            assert_eq!(read(&memory, &src).unwrap(), [1.0, 2.0], "releasing an alias poisons nothing");
            memory.zero(Q, SliceMut::whole(&mut src)).unwrap();
            assert!(memory.alias(&mut dst, &src));
            memory.release(Q, &mut src);
            assert_eq!(
                read(&memory, &dst).unwrap(),
                [0.0, 0.0],
                "an alias outlives the contents of its source"
            );
            memory.write(Q, HostSlice::F32(&[3.0, 4.0]), SliceMut::whole(&mut src)).unwrap();
            assert_eq!(read(&memory, &dst).unwrap(), [0.0, 0.0]);
        }
    }
    let [mut host, device] = places(&memory, Category::Unsharded, 2);
    assert!(!memory.alias(&mut host, &device), "they lie in different memory");
}

#[test]
fn temporary_buffers_are_allocated_only_once() {
    let device = fake_cuda::device();
    let memory = cuda_on(device);
    let step = |seed| {
        let x = filled(&memory, DType::F32, &normal(seed, 1000));
        let y = filled(&memory, DType::Bf16, &normal(seed, 1000));
        let mut z = memory.allocate(Category::Workspace, DType::F32, 1000).unwrap();
        memory.copy(Q, Slice::whole(&y), SliceMut::whole(&mut z)).unwrap();
        drop(y);
        memory
            .compute(Queue::Reduce, Arithmetic::Accumulate(Slice::whole(&x)), SliceMut::whole(&mut z))
            .unwrap();
        let _again = filled(&memory, DType::Bf16, &normal(seed, 1000));
    };
    step(0);
    let allocations = || ["cuMemAlloc", "cuMemHostAlloc", "cuMemFree"].map(|call| device.calls(call));
    let before = (allocations(), memory.usage().allocations);
    (1..20).for_each(step);
    assert_eq!((allocations(), memory.usage().allocations), before);
}

#[test]
fn mismatched_lengths_and_dtypes_panic_with_details() {
    let memory = &*subject();
    let x = filled(memory, DType::F32, &[1.0, 2.0, 3.0]);
    let mut integer = memory.allocate(Category::CommStaging, DType::I64, 3).unwrap();
    let mut short = memory.allocate(Category::CommStaging, DType::F32, 2).unwrap();
    let mut sum = memory.allocate(Category::CommStaging, DType::I64, 69).unwrap();
    memory.zero(Q, SliceMut::whole(&mut sum)).unwrap();
    let mut double = filled(memory, DType::F64, &[0.0; 3]);
    let whole = Slice::whole(&x);
    let not_float = "this needs a float dtype, not i64";
    panics(not_float, || memory.copy(Q, whole, SliceMut::whole(&mut integer)));
    panics("copied elements: 3, but 2 are needed", || memory.copy(Q, whole, SliceMut::whole(&mut short)));
    let added = Arithmetic::Accumulate(whole);
    panics("accumulated elements: 3 of f32, but 3 of f64 are needed", || {
        memory.compute(Q, added, SliceMut::whole(&mut double))
    });
    panics("accumulated elements: 3 of f32, but 2 of f32 are needed", || {
        memory.compute(Q, added, SliceMut::whole(&mut short))
    });
    panics(not_float, || memory.compute(Q, Arithmetic::Scale(0.5), SliceMut::whole(&mut integer)));
    let [ragged, row] = [2, 3].map(|row_len| [Rows { offset: 0, len: 3, row_len }]);
    panics("3 is not a multiple of 2", || {
        memory.compute(Q, Arithmetic::SquareSum(whole, &ragged), SliceMut::whole(&mut sum))
    });
    let squares = Arithmetic::SquareSum(whole, &row);
    panics("words of an exact sum: 3 of f64, but 69 of i64 are needed", || {
        memory.compute(Q, squares, SliceMut::whole(&mut double))
    });
    panics("words of an exact sum: 68 of i64, but 69 of i64 are needed", || {
        memory.compute(Q, squares, SliceMut::new(&mut sum, 0, 68))
    });
    panics("terms of an exact sum: 3 of f32, but 3 of f64 are needed", || {
        memory.compute(Q, Arithmetic::ExactSum(whole), SliceMut::whole(&mut sum))
    });
    panics("words of a step's scalars: 69 of i64, but 141 of i64 are needed", || {
        let scalars = Slice::whole(&sum);
        let factors = Arithmetic::GradientFactors { scalars, divisor: 1.0, grad_clip: None };
        memory.compute(Q, factors, SliceMut::whole(&mut double))
    });
    panics("a buffer of f64 is used where i64 is needed", || {
        memory.write(Q, HostSlice::I64(&[1, 2, 3]), SliceMut::whole(&mut double))
    });
    panics("written elements: 2, but 3 are needed", || {
        memory.write(Q, HostSlice::F32(&[1.0, 2.0]), SliceMut::whole(&mut double))
    });
    panics("a buffer of f32 is used where i64 is needed", || {
        memory.read(Q, whole, HostSliceMut::I64(&mut [0; 3]))
    });
    panics("read elements: 3, but 2 are needed", || memory.read(Q, whole, HostSliceMut::F32(&mut [0.0; 2])));
}

/// Checks that a call panics with a message that contains `words`.
#[track_caller]
fn panics(words: &str, call: impl FnOnce() -> Result<(), Error>) {
    let panic = catch_unwind(AssertUnwindSafe(call)).expect_err(words);
    let message = panic.downcast_ref::<String>().cloned().unwrap_or_default();
    assert!(message.contains(words), "{message}");
}
