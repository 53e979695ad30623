//! Tests of handles, accounting and the pool.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use fsdp_core::memory::{
    Arithmetic, Buffer, Category, HostSlice, HostSliceMut, Memory, Rows, Slice, SliceMut,
};
use fsdp_core::scalars::{COUNT, GradientFactors, LOSS, SCALAR_WORDS};
use fsdp_core::{DType, Error, ExactSum, Queue};

use crate::{HostBuffer, HostMemory, HostOptions, HostPool};

const Q: Queue = Queue::Compute;

fn memory(poison: bool) -> HostMemory {
    HostMemory::new(HostOptions { poison, ..HostOptions::default() }).unwrap()
}

fn filled(memory: &HostMemory, values: &[f32]) -> HostBuffer {
    let mut buffer = memory.allocate(Category::Activation, DType::F32, values.len()).unwrap();
    memory.write(Q, HostSlice::F32(values), SliceMut::whole(&mut buffer)).unwrap();
    buffer
}

fn read(memory: &HostMemory, buffer: &HostBuffer) -> Result<Vec<f32>, Error> {
    let mut values = vec![0.0; buffer.len()];
    memory.read(Q, Slice::whole(buffer), HostSliceMut::F32(&mut values))?;
    Ok(values)
}

#[test]
fn usage_counts_until_last_handle_is_dropped() {
    let memory = memory(false);
    let a = memory.allocate(Category::Activation, DType::F32, 10).unwrap();
    let clone = a.clone();
    drop(a);
    assert_eq!(memory.usage().live(Category::Activation), 40);
    let b = memory.allocate(Category::Workspace, DType::Bf16, 7).unwrap();
    assert_eq!(memory.usage().device.total_peak_bytes, 54);
    drop((clone, b));
    let usage = memory.usage();
    assert_eq!(usage.device.live_bytes, [0; Category::COUNT]);
    assert_eq!((usage.peak(Category::Activation), usage.peak(Category::Workspace)), (40, 14));
    assert_eq!(usage.allocations, 0, "storage is taken when it is first written");
}

#[test]
fn write_to_shared_buffer_is_rejected() {
    let memory = memory(false);
    let mut early = memory.allocate(Category::Activation, DType::F32, 4).unwrap();
    assert!(early.is_exclusive());
    let clone = early.clone();
    assert!(!early.is_exclusive(), "a clone counts before there is storage");
    let write = memory.zero(Q, SliceMut::whole(&mut early));
    assert!(matches!(write, Err(Error::Shared { readers: 1, .. })));
    drop(clone);
    memory.zero(Q, SliceMut::whole(&mut early)).unwrap();
    let _late = early.clone();
    assert!(matches!(memory.zero(Q, SliceMut::whole(&mut early)), Err(Error::Shared { .. })));
}

#[test]
fn contents_are_readable_only_from_first_write_to_release() {
    let memory = memory(false);
    let unwritten = memory.allocate(Category::Activation, DType::F32, 4).unwrap();
    assert!(matches!(read(&memory, &unwritten), Err(Error::Released { .. })));
    let mut buffer = filled(&memory, &[1.0, 2.0]);
    assert_eq!(read(&memory, &buffer).unwrap(), [1.0, 2.0]);
    memory.release(Q, &mut buffer);
    assert!(matches!(read(&memory, &buffer), Err(Error::Released { .. })));
    assert_eq!(memory.usage().live(Category::Activation), 24, "a released buffer stays counted");
}

#[test]
fn released_resident_buffer_keeps_storage_but_not_contents() {
    let options = HostOptions { poison: true, resident: true, ..HostOptions::default() };
    let memory = HostMemory::new(options).unwrap();
    let mut buffer = filled(&memory, &[1.0, 2.0]);
    memory.release(Q, &mut buffer);
    assert!(matches!(read(&memory, &buffer), Err(Error::Released { .. })));
    let other = filled(&memory, &[3.0, 4.0]);
    memory.write(Q, HostSlice::F32(&[5.0]), SliceMut::new(&mut buffer, 0, 1)).unwrap();
    let values = read(&memory, &buffer).unwrap();
    assert!(values[0] == 5.0 && values[1].is_nan(), "what is not written again is poisoned");
    assert_eq!(memory.usage().allocations, 2);
    drop(other);
}

#[test]
fn alias_shares_storage_until_released() {
    let memory = memory(true);
    let mut src = filled(&memory, &[1.0, 2.0]);
    let mut dst = memory.allocate(Category::Unsharded, DType::F32, 2).unwrap();
    assert!(memory.alias(&mut dst, &src));
    assert_eq!(read(&memory, &dst).unwrap(), [1.0, 2.0]);
    assert!(src.is_exclusive() && dst.is_exclusive(), "an alias is a buffer of its own");
    assert!(matches!(memory.zero(Q, SliceMut::whole(&mut src)), Err(Error::Shared { .. })));
    memory.release(Q, &mut dst);
    assert_eq!(read(&memory, &src).unwrap(), [1.0, 2.0], "releasing an alias poisons nothing");
    memory.zero(Q, SliceMut::whole(&mut src)).unwrap();
    assert_eq!(memory.usage().live(Category::Unsharded), 8);
    let mut other = memory.allocate(Category::Unsharded, DType::F32, 3).unwrap();
    assert!(!memory.alias(&mut other, &src), "lengths differ");
}

#[test]
fn poison_fills_new_and_released_storage() {
    let memory = memory(true);
    let mut buffer = memory.allocate(Category::Activation, DType::F32, 3).unwrap();
    memory.zero(Q, SliceMut::new(&mut buffer, 0, 1)).unwrap();
    let values = read(&memory, &buffer).unwrap();
    assert!(values[0] == 0.0 && values[1].is_nan() && values[2].is_nan());
    memory.release(Q, &mut buffer);
    memory.zero(Q, SliceMut::new(&mut buffer, 1, 1)).unwrap();
    let values = read(&memory, &buffer).unwrap();
    assert!(values[0].is_nan() && values[1] == 0.0 && values[2].is_nan());
}

#[test]
fn storage_reuse_is_not_counted_as_allocation() {
    let pool = HostPool::new();
    let options = HostOptions { pool: Arc::clone(&pool), ..HostOptions::default() };
    let (first, second) = (HostMemory::new(options.clone()).unwrap(), HostMemory::new(options).unwrap());
    for _ in 0..3 {
        drop((filled(&first, &[1.0; 100]), filled(&first, &[1.0; 200])));
    }
    assert_eq!(first.usage().allocations, 2);
    drop(filled(&second, &[1.0; 100]));
    assert_eq!(second.usage().allocations, 0, "ranks share their pool");
    pool.trim();
    drop(filled(&second, &[1.0; 100]));
    assert_eq!(second.usage().allocations, 1);
}

#[test]
fn copies_convert_and_round_to_nearest_even() {
    let memory = memory(false);
    let values = [1.0, 1.00390625, 1.01171875, -3.0e38, f64::NAN, 1.0 + f64::EPSILON + 1.0 / 256.0];
    let mut wide = memory.allocate(Category::Activation, DType::F64, 6).unwrap();
    memory.write(Q, HostSlice::F64(&values), SliceMut::whole(&mut wide)).unwrap();
    let mut half = memory.allocate(Category::Activation, DType::Bf16, 6).unwrap();
    memory.copy(Q, Slice::whole(&wide), SliceMut::whole(&mut half)).unwrap();
    let mut back = [0.0; 6];
    memory.read(Q, Slice::whole(&half), HostSliceMut::F64(&mut back)).unwrap();
    assert_eq!(back[..3], [1.0, 1.0, 1.015625], "ties go to even");
    assert!(back[4].is_nan());
    assert_eq!(back[5], 1.0078125, "rounded once, not through single precision");
}

#[test]
fn integer_accumulation_wraps() {
    let memory = memory(false);
    let mut integers = memory.allocate(Category::CommStaging, DType::I64, 2).unwrap();
    memory.write(Q, HostSlice::I64(&[i64::MAX, 5]), SliceMut::whole(&mut integers)).unwrap();
    let mut more = memory.allocate(Category::CommStaging, DType::I64, 2).unwrap();
    memory.write(Q, HostSlice::I64(&[1, 6]), SliceMut::whole(&mut more)).unwrap();
    memory.compute(Q, Arithmetic::Accumulate(Slice::whole(&integers)), SliceMut::whole(&mut more)).unwrap();
    let mut values = [0; 2];
    memory.read(Q, Slice::whole(&more), HostSliceMut::I64(&mut values)).unwrap();
    assert_eq!(values, [i64::MIN, 11]);
}

#[test]
fn scaling_rounds_factor_then_each_product() {
    let memory = memory(true);
    let third = 1.0 / 3.0;
    let scaled = |dtype, value: f64| {
        let mut buffer = memory.allocate(Category::GradientSlot, dtype, 3).unwrap();
        memory.write(Q, HostSlice::F64(&[value; 3]), SliceMut::whole(&mut buffer)).unwrap();
        memory.compute(Q, Arithmetic::Scale(third), SliceMut::new(&mut buffer, 1, 1)).unwrap();
        let mut values = [0.0; 3];
        memory.read(Q, Slice::whole(&buffer), HostSliceMut::F64(&mut values)).unwrap();
        assert_eq!((values[0], values[2]), (value, value), "elements beside the range stay");
        values[1]
    };
    assert_eq!(scaled(DType::F32, 7.0), f64::from(7.0 * third as f32));
    assert_eq!(scaled(DType::F64, 7.0), 7.0 * third);
    // A third is 0.333984375 in bf16: 130 times that is 43.418, whereas a third of 130 is nearest to 43.25.
    assert_eq!(scaled(DType::Bf16, 130.0), 43.5);
    let mut integers = memory.allocate(Category::CommStaging, DType::I64, 1).unwrap();
    memory.zero(Q, SliceMut::whole(&mut integers)).unwrap();
    let scaled = panics(|| memory.compute(Q, Arithmetic::Scale(third), SliceMut::whole(&mut integers)));
    assert_eq!(scaled, "this needs a float dtype, not i64");
}

#[test]
fn square_sums_over_rows_are_exact_in_any_order() {
    let memory = memory(false);
    let buffer = filled(&memory, &[3.0, 4.0, 1e-3, 2.0, 0.0, 1.0]);
    let empty = || {
        let mut words = memory.allocate(Category::CommStaging, DType::I64, ExactSum::WORDS).unwrap();
        memory.zero(Q, SliceMut::whole(&mut words)).unwrap();
        words
    };
    let words = |buffer: &HostBuffer| {
        let mut words = [0; ExactSum::WORDS];
        memory.read(Q, Slice::whole(buffer), HostSliceMut::I64(&mut words)).unwrap();
        words
    };
    let (mut sum, mut parts) = (empty(), empty());
    let of = |src, rows: &[Rows], sum: &mut HostBuffer| {
        memory.compute(Q, Arithmetic::SquareSum(src, rows), SliceMut::whole(sum))
    };
    of(Slice::whole(&buffer), &[Rows { offset: 0, len: 6, row_len: 2 }], &mut sum).unwrap();
    of(Slice::new(&buffer, 4, 2), &[Rows { offset: 0, len: 2, row_len: 2 }], &mut parts).unwrap();
    let rows = [2, 0].map(|offset| Rows { offset, len: 2, row_len: 2 });
    of(Slice::whole(&buffer), &rows, &mut parts).unwrap();
    assert_eq!(words(&sum), words(&parts));
    let value = ExactSum::from_words(&words(&sum)).value();
    assert_eq!(value, 25.0 + (f64::from(1e-3f32).powi(2) + 4.0) + 1.0);
    let rows = [Rows { offset: 0, len: 6, row_len: 4 }];
    let ragged = panics(|| of(Slice::whole(&buffer), &rows, &mut sum));
    assert_eq!(ragged, "elements of rows: 6 is not a multiple of 4");
    let outside = panics(|| of(Slice::new(&buffer, 1, 5), &[Rows { row_len: 2, ..rows[0] }], &mut sum));
    assert_eq!(outside, "rows at 0..6 of 5 elements");
}

#[test]
fn failed_host_allocation_is_out_of_memory_error() {
    let pool = HostPool::new();
    let memory = HostMemory::new(HostOptions { pool: Arc::clone(&pool), ..HostOptions::default() }).unwrap();
    let _kept = filled(&memory, &[1.0; 16]);
    let mut buffer = memory.allocate(Category::OptimizerState, DType::F32, 1 << 58).unwrap();
    let error = memory.zero(Q, SliceMut::whole(&mut buffer)).unwrap_err();
    let Error::OutOfMemory(full) = &error else { panic!("{error}") };
    assert_eq!((full.category, full.bytes), (Category::OptimizerState, Some(1 << 60)));
    assert_eq!(
        error.to_string(),
        "no room for 1.0 EiB of host memory for optimizer state: the buffers of this process hold 64 bytes"
    );
    assert_eq!(pool.held_bytes(), 64);
}

#[test]
fn mismatched_lengths_and_dtypes_panic_with_details() {
    let memory = memory(false);
    let a = filled(&memory, &[1.0; 4]);
    let mut b = memory.allocate(Category::Activation, DType::F32, 3).unwrap();
    let copied = panics(|| memory.copy(Q, Slice::whole(&a), SliceMut::whole(&mut b)));
    assert!(copied.contains("copied elements: 4, but 3 are needed"), "{copied}");
    let mut ids = memory.allocate(Category::Activation, DType::U32, 4).unwrap();
    let copied = panics(|| memory.copy(Q, Slice::whole(&a), SliceMut::whole(&mut ids)));
    assert!(copied.contains("u32"), "{copied}");
    let written = panics(|| memory.write(Q, HostSlice::U32(&[1, 2, 3]), SliceMut::whole(&mut b)));
    assert!(written.contains("u32"), "{written}");
}

/// Returns the panic message of a call.
fn panics(call: impl FnOnce() -> Result<(), Error>) -> String {
    let panic = catch_unwind(AssertUnwindSafe(call)).expect_err("it has to panic");
    panic.downcast_ref::<String>().cloned().unwrap_or_default()
}

#[test]
fn gradient_factors_stay_non_finite_after_nan_loss() {
    let memory = memory(false);
    let mut factors = memory.allocate(Category::CommStaging, DType::F64, GradientFactors::LEN).unwrap();
    memory.write(Q, HostSlice::F64(&GradientFactors::START), SliceMut::whole(&mut factors)).unwrap();
    let mut step = |loss: f64| {
        let mut words = [0; SCALAR_WORDS];
        let mut sum = ExactSum::default();
        sum.add(loss);
        words[LOSS].copy_from_slice(&sum.to_words());
        words[COUNT] = 4;
        let mut scalars = memory.allocate(Category::CommStaging, DType::I64, SCALAR_WORDS).unwrap();
        memory.write(Q, HostSlice::I64(&words), SliceMut::whole(&mut scalars)).unwrap();
        let scalars = Slice::whole(&scalars);
        let operation = Arithmetic::GradientFactors { scalars, divisor: 1.0, grad_clip: None };
        memory.compute(Q, operation, SliceMut::whole(&mut factors)).unwrap();
        let mut found = [0.0; GradientFactors::LEN];
        memory.read(Q, Slice::whole(&factors), HostSliceMut::F64(&mut found)).unwrap();
        GradientFactors::from_array(found)
    };
    assert_eq!(step(8.0), GradientFactors { scale: 0.25, clip: 1.0, finite: true });
    assert!(!step(f64::NAN).finite);
    assert!(!step(8.0).finite);
}
