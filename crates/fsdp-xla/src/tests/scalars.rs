//! Exact sums and factors in programs, beside those of the core.

use fsdp_core::memory::{Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut};
use fsdp_core::scalars::{COUNT, GradientFactors, LOSS, NOT_FINITE, SCALAR_WORDS, SQUARED_NORM};
use fsdp_core::{DType, ExactSum, Queue};

use super::with_memory;
use crate::buffer::XlaBuffer;
use crate::memory::XlaMemory;

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

#[test]
fn a_number_is_added_to_an_exact_sum_as_in_the_core() {
    let numbers = [
        0.0,
        1.0,
        -1.0,
        0.1,
        -3.75e-3,
        1e300,
        -1e300,
        f64::MAX,
        f64::MIN_POSITIVE,
        5e-324,
        -7e-310,
        1e-40,
        123456.789,
        f64::INFINITY,
        f64::NAN,
    ];
    with_memory("this test", |memory| {
        for number in numbers {
            let mut sum = ExactSum::default();
            sum.add(2.5);
            let mut words = buffer(memory, HostSlice::I64(&sum.to_words()));
            let values = buffer(memory, HostSlice::F64(&[number]));
            memory.begin_schedule();
            memory.exact_sum(QUEUE, Slice::whole(&values), SliceMut::whole(&mut words)).unwrap();
            memory.end_schedule().unwrap();
            let mut found = [0; ExactSum::WORDS];
            memory.read(QUEUE, Slice::whole(&words), HostSliceMut::I64(&mut found)).unwrap();
            sum.add(number);
            let found = ExactSum::from_words(&found);
            assert_eq!(found.to_words(), sum.to_words(), "{number:e}");
        }
    });
}

#[test]
fn factors_are_those_of_the_core() {
    // The last one is a state that is not finite.
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
                memory.gradient_factors(QUEUE, scalars, divisor, grad_clip, out).unwrap();
                memory.end_schedule().unwrap();
                let found = GradientFactors::read(&**memory, QUEUE, Slice::whole(&factors)).unwrap();
                let wanted = GradientFactors::of(&words, divisor, grad_clip, *was_finite != 0.0);
                assert_eq!((found.scale, found.finite), (wanted.scale, wanted.finite), "{words:?}");
                // Digits are added as floats, in an order of the compiler's: a few units in the last place.
                let near = (found.clip - wanted.clip).abs() <= 1e-14 * wanted.clip;
                assert!(near || !wanted.finite, "{found:?} {wanted:?}");
            }
        }
    });
}
