//! Compares exact sums and factors in programs with those of the core.

use fsdp_core::memory::{Arithmetic, Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut};
use fsdp_core::scalars::{COUNT, GradientFactors, LOSS, NOT_FINITE, SCALAR_WORDS, SQUARED_NORM};
use fsdp_core::{DType, ExactSum, Queue};

use super::with_memory;
use crate::buffer::XlaBuffer;
use crate::hlo::Element;
use crate::memory::XlaMemory;
use crate::scalars::gradient_factors;

const QUEUE: Queue = Queue::Compute;

fn buffer(memory: &XlaMemory, values: HostSlice<'_>) -> XlaBuffer {
    let (dtype, len) = match values {
        HostSlice::F32(values) => (DType::F32, values.len()),
        HostSlice::F64(values) => (DType::F64, values.len()),
        HostSlice::I64(values) => (DType::I64, values.len()),
        _ => unreachable!("nothing else is tested"),
    };
    let mut buffer = memory.allocate(Category::Workspace, dtype, len).unwrap();
    memory.write(QUEUE, values, SliceMut::whole(&mut buffer)).unwrap();
    buffer
}

/// The part of a number that programs add to a sum: no bits below 2^-114; infinite from 2^127 on.
fn within_range(number: f64) -> f64 {
    if number.abs() < 2f64.powi(127) {
        (number * 2f64.powi(114)).trunc() / 2f64.powi(114)
    } else {
        f64::INFINITY
    }
}

/// Also in single precision, which has the range of emulated double precision on TPUs.
#[test]
fn exact_sum_matches_core() {
    let (small, large) = (2f64.powi(-114), 2f64.powi(127));
    let numbers = [
        0.0,
        1.0,
        -1.0,
        0.1,
        -3.75e-3,
        123456.789,
        4294967295.0,
        -4294967296.5,
        1e20 + 1e5,
        -1e-20,
        small,
        -1.5 * small,
        0.9 * small,
        1e-40,
        5e-324,
        large,
        -0.999999 * large,
        1e300,
        -f64::MAX,
        f64::INFINITY,
        f64::NAN,
    ];
    with_memory("this test", |memory| {
        let check = |number: f64, values: HostSlice<'_>| {
            let mut sum = ExactSum::default();
            sum.add(2.5);
            let mut words = buffer(memory, HostSlice::I64(&sum.to_words()));
            let values = buffer(memory, values);
            memory.begin_schedule();
            let sum_of_values = Arithmetic::ExactSum(Slice::whole(&values));
            memory.compute(QUEUE, sum_of_values, SliceMut::whole(&mut words)).unwrap();
            memory.end_schedule().unwrap();
            let mut found = [0; ExactSum::WORDS];
            memory.read(QUEUE, Slice::whole(&words), HostSliceMut::I64(&mut found)).unwrap();
            sum.add(within_range(number));
            let found = ExactSum::from_words(&found);
            assert_eq!(found.to_words(), sum.to_words(), "{number:e} in {:?}", values.storage.dtype);
        };
        for number in numbers {
            check(number, HostSlice::F64(&[number]));
            let single = number as f32;
            check(single.into(), HostSlice::F32(&[single]));
        }
    });
}

/// The inputs of a step's factors are within the range of single precision: they can be computed in its arithmetic,
/// too.
#[test]
fn gradient_factors_fit_single_precision_range() {
    with_memory("this test", |memory| {
        let mut words = vec![0; SCALAR_WORDS];
        for (range, value) in [(LOSS, 5.5), (SQUARED_NORM, 1e30)] {
            let mut sum = ExactSum::default();
            sum.add(value);
            words[range].copy_from_slice(&sum.to_words());
        }
        words[COUNT] = 4;
        let scalars = buffer(memory, HostSlice::I64(&words));
        let mut factors = buffer(memory, HostSlice::F32(&[0.25, 1.0, 1.0]));
        memory.begin_schedule();
        {
            let mut trace = memory.lock();
            let trace = trace.as_mut().unwrap();
            let words = trace.load(QUEUE, Slice::whole(&scalars));
            let before = trace.load(QUEUE, Slice::whole(&factors));
            let divisor = trace.input_floats(&[1.0], Element::F32);
            let new = gradient_factors(&mut trace.hlo, &words, &before, &divisor, Some(1.0));
            trace.store(QUEUE, &SliceMut::whole(&mut factors), &new);
        }
        memory.end_schedule().unwrap();
        let mut found = [0.0; 3];
        memory.read(QUEUE, Slice::whole(&factors), HostSliceMut::F32(&mut found)).unwrap();
        let norm = 1e15 / 4.0;
        assert_eq!((found[0], found[2]), (0.25, 1.0), "{found:?}");
        assert!((found[1] * norm - 1.0).abs() < 1e-6, "{found:?}");
    });
}

#[test]
fn gradient_factors_match_core() {
    // The last case has non-finite state.
    let cases = [
        (vec![3.0, 5.0], vec![9.0, 16.0], 4, 0, 1.0),
        (vec![1e-3], vec![1e-30], 7, 0, 1.0),
        (vec![f64::NAN], vec![1.0], 1, 0, 1.0),
        (vec![1.0], vec![f64::INFINITY], 1, 0, 1.0),
        (vec![], vec![], 0, 0, 1.0),
        (vec![2.0], vec![2.0], 2, 0, 0.0),
        (vec![2.0], vec![2.0], 2, 1, 1.0),
    ];
    with_memory("this test", |memory| {
        for (losses, squares, count, not_finite, was_finite) in &cases {
            let mut words = vec![0; SCALAR_WORDS];
            for (range, values) in [(LOSS, losses), (SQUARED_NORM, squares)] {
                let mut sum = ExactSum::default();
                values.iter().for_each(|&value| sum.add(value));
                words[range].copy_from_slice(&sum.to_words());
            }
            (words[COUNT], words[NOT_FINITE]) = (*count, *not_finite);
            for (divisor, grad_clip) in
                [(1.0, None), (8.0, Some(0.5)), (1.0, Some(1e9)), (1.0 / 4096.0, Some(1e-6))]
            {
                let scalars = buffer(memory, HostSlice::I64(&words));
                let mut factors = buffer(memory, HostSlice::F64(&[0.25, 1.0, *was_finite]));
                memory.begin_schedule();
                let (scalars, out) = (Slice::whole(&scalars), SliceMut::whole(&mut factors));
                let operation = Arithmetic::GradientFactors { scalars, divisor, grad_clip };
                memory.compute(QUEUE, operation, out).unwrap();
                memory.end_schedule().unwrap();
                let mut found = [0.0; GradientFactors::LEN];
                memory.read(QUEUE, Slice::whole(&factors), HostSliceMut::F64(&mut found)).unwrap();
                let found = GradientFactors::from_array(found);
                let expected = GradientFactors::of(&words, divisor, grad_clip, *was_finite != 0.0);
                assert_eq!((found.scale, found.finite), (expected.scale, expected.finite), "{words:?}");
                // Digits are added as floats in an order of the compiler's choice: a few units in the last place.
                let near = (found.clip - expected.clip).abs() <= 1e-14 * expected.clip;
                assert!(near || !expected.finite, "{found:?} {expected:?}");
            }
        }
    });
}
