//! Checks that the operations of a memory give the same bits on the device and on the host.

use fsdp_core::memory::{Arithmetic, Memory, Rows, Slice, SliceMut};
use fsdp_core::scalars::{COUNT, GradientFactors, LOSS, NOT_FINITE, SCALAR_WORDS, SQUARED_NORM};
use fsdp_core::{DType, ExactSum, Queue};

use super::subject::subject;
use super::values::*;

const Q: Queue = Queue::Compute;

/// Returns numbers of every magnitude, with NaN, infinity and other special values among them.
fn wild(key: u64, len: usize) -> Vec<f64> {
    let mut values = normal(key, len);
    for (i, value) in values.iter_mut().enumerate() {
        *value *= 10f64.powi((i % 80) as i32 - 40);
    }
    // In bf16 this rounds up, unless rounding to f32 first makes it a tie.
    let near_tie = 1.0 + 2f64.powi(-8) + 2f64.powi(-40);
    let special = [f64::NAN, f64::INFINITY, -0.0, 1e-45, -1e-320, 3.4e38, 1.0 + 2f64.powi(-9), near_tie];
    for (at, special) in special.into_iter().enumerate() {
        if let Some(value) = values.get_mut(11 * at + 3) {
            *value = special;
        }
    }
    values
}

#[test]
fn copy_rounding_matches_host() {
    fn copied<M: Memory>(memory: &M, [from, to]: [DType; 2], shift: usize, numbers: &[f64]) -> Vec<f64> {
        let src = shifted(memory, from, shift, numbers);
        let mut dst = room(memory, to, numbers.len() + 1);
        let range_of_src = Slice::new(&src, shift, numbers.len());
        memory.copy(Q, range_of_src, SliceMut::new(&mut dst, 1, numbers.len())).unwrap();
        range(memory, &dst, 1, numbers.len())
    }
    let (cuda, host) = (&*subject(), &host());
    for from in FLOATS {
        for to in FLOATS {
            for (shift, len) in [(0, 1000), (1, 257), (3, 8), (7, 1), (0, 0)] {
                let numbers = wild(len as u64, len);
                let (got, expected) =
                    (copied(cuda, [from, to], shift, &numbers), copied(host, [from, to], shift, &numbers));
                assert_bits(&got, &expected, &format!("{from} to {to}, {len} from {shift}"));
            }
        }
    }
}

#[test]
fn accumulate_rounding_matches_host() {
    fn summed<M: Memory>(memory: &M, dtype: DType, shift: usize, numbers: &[f64]) -> Vec<f64> {
        let len = numbers.len() / 2;
        let src = shifted(memory, dtype, shift, &numbers[..len]);
        let mut dst = shifted(memory, dtype, shift, &numbers[len..]);
        let added = Arithmetic::Accumulate(Slice::new(&src, shift, len));
        memory.compute(Q, added, SliceMut::new(&mut dst, shift, len)).unwrap();
        range(memory, &dst, shift, len)
    }
    let (cuda, host) = (&*subject(), &host());
    for dtype in FLOATS {
        for len in LENS {
            for shift in [0, 1, 4] {
                let numbers = wild(5, 2 * len);
                let (got, expected) =
                    (summed(cuda, dtype, shift, &numbers), summed(host, dtype, shift, &numbers));
                assert_bits(&got, &expected, &format!("{dtype}, {len} from {shift}"));
            }
        }
    }
}

#[test]
fn scale_rounding_matches_host() {
    fn scaled<M: Memory>(memory: &M, dtype: DType, factor: f64, shift: usize, numbers: &[f64]) -> Vec<f64> {
        let mut dst = shifted(memory, dtype, shift, numbers);
        let range_of_dst = SliceMut::new(&mut dst, shift, numbers.len());
        memory.compute(Q, Arithmetic::Scale(factor), range_of_dst).unwrap();
        range(memory, &dst, shift, numbers.len())
    }
    let (cuda, host) = (&*subject(), &host());
    for dtype in FLOATS {
        for factor in [1.0, 0.5, 1.0 / 3.0, 1.0 / 7.0] {
            for len in LENS {
                for shift in [0, 1, 4] {
                    let numbers = wild(9, len);
                    let got = scaled(cuda, dtype, factor, shift, &numbers);
                    let expected = scaled(host, dtype, factor, shift, &numbers);
                    assert_bits(&got, &expected, &format!("{dtype} by {factor}, {len} from {shift}"));
                }
            }
        }
    }
}

#[test]
fn integer_sums_wrap() {
    let cuda = &*subject();
    let mut sum = integers(cuda, &[1, i64::MAX, -5]);
    let more = integers(cuda, &[2, 1, 5]);
    cuda.compute(Q, Arithmetic::Accumulate(Slice::whole(&more)), SliceMut::whole(&mut sum)).unwrap();
    assert_eq!(words(cuda, &sum), [3, i64::MIN, 0]);
}

#[test]
fn zero_fills_only_its_range() {
    let cuda = &*subject();
    for dtype in FLOATS {
        let mut buffer = filled(cuda, dtype, &[1.0, 2.0, 3.0, 4.0]);
        cuda.zero(Q, SliceMut::new(&mut buffer, 1, 2)).unwrap();
        assert_eq!(values(cuda, &buffer), [1.0, 0.0, 0.0, 4.0]);
    }
}

/// Adds squares of numbers to an exact sum that already has a value, and returns its words.
fn square_sums<M: Memory>(memory: &M, dtype: DType, row_len: usize, numbers: &[f64]) -> Vec<i64> {
    let src = filled(memory, dtype, numbers);
    let mut start = ExactSum::default();
    start.add(-0.125);
    let mut before = vec![0; SCALAR_WORDS];
    before[SQUARED_NORM].copy_from_slice(&start.to_words());
    let mut sum = integers(memory, &before);
    let words_of_norm = SliceMut::new(&mut sum, SQUARED_NORM.start, SQUARED_NORM.len());
    // In two pieces, as parameters lie in a shard.
    let split = numbers.len() / row_len / 2 * row_len;
    let rows =
        [(0, split), (split, numbers.len() - split)].map(|(offset, len)| Rows { offset, len, row_len });
    memory.compute(Q, Arithmetic::SquareSum(Slice::whole(&src), &rows), words_of_norm).unwrap();
    let after = words(memory, &sum);
    assert!(after[LOSS].iter().all(|&word| word == 0), "words beside the sum stay");
    ExactSum::from_words(&after[SQUARED_NORM]).to_words().into()
}

#[test]
fn square_sums_match_host_bitwise() {
    let (cuda, host) = (&*subject(), &host());
    for dtype in FLOATS {
        for (row_len, rows) in [(1, 1), (1, 1000), (2, 7), (33, 5), (64, 40), (768, 3), (1000, 17)] {
            let numbers = normal(row_len as u64, row_len * rows);
            let (got, expected) =
                (square_sums(cuda, dtype, row_len, &numbers), square_sums(host, dtype, row_len, &numbers));
            assert_eq!(got, expected, "{rows} rows of {row_len} x {dtype}");
        }
    }
    let (got, expected) = (
        square_sums(cuda, DType::F32, 4, &[1.0, f64::NAN, 2.0, 3.0]),
        square_sums(host, DType::F32, 4, &[1.0, f64::NAN, 2.0, 3.0]),
    );
    assert_eq!(got, expected, "what is not finite is counted");
}

#[test]
fn add_counts_adds_to_existing_sums() {
    fn added<M: Memory>(memory: &M, counts: &[f64]) -> Vec<i64> {
        let src = filled(memory, DType::F64, counts);
        let mut sums = integers(memory, &vec![-5; counts.len()]);
        for _ in 0..2 {
            memory.compute(Q, Arithmetic::AddCounts(Slice::whole(&src)), SliceMut::whole(&mut sums)).unwrap();
        }
        words(memory, &sums)
    }
    for len in [1, 7, 128, 5000] {
        let counts: Vec<i64> = (0..len).map(|i| i * i).collect();
        let as_numbers: Vec<f64> = counts.iter().map(|&count| count as f64).collect();
        let expected: Vec<i64> = counts.iter().map(|count| 2 * count - 5).collect();
        assert_eq!(added(&*subject(), &as_numbers), expected);
        assert_eq!(added(&host(), &as_numbers), expected);
    }
}

#[test]
fn exact_sums_match_host_bitwise() {
    fn summed<M: Memory>(memory: &M, numbers: &[f64]) -> ExactSum {
        let src = filled(memory, DType::F64, numbers);
        let mut sum = integers(memory, &[0; ExactSum::WORDS]);
        memory.compute(Q, Arithmetic::ExactSum(Slice::whole(&src)), SliceMut::whole(&mut sum)).unwrap();
        ExactSum::from_words(&words(memory, &sum))
    }
    let (cuda, host) = (&*subject(), &host());
    let extremes = [f64::MAX, -f64::MAX, 5e-324, -3e-310, 1e300, -1e-300, 0.0, -0.0, f64::MIN_POSITIVE];
    for numbers in [&extremes[..], &normal(3, 5000), &wild(4, 300), &[1e16, 1.0, -1e16, 1e-300]] {
        assert_eq!(summed(cuda, numbers).to_words(), summed(host, numbers).to_words());
    }
    assert_eq!(summed(cuda, &[1e16, 1.0, -1e16]).value(), 1.0);
}

/// Returns the factors of a step with these scalars, computed over the factors of an earlier step.
fn factors<M: Memory>(
    memory: &M,
    scalars: &[i64],
    divisor: f64,
    grad_clip: Option<f64>,
    before: GradientFactors,
) -> Vec<f64> {
    let scalars = integers(memory, scalars);
    let mut factors = filled(memory, DType::F64, &before.to_array());
    let (scalars, into) = (Slice::whole(&scalars), SliceMut::whole(&mut factors));
    memory.compute(Q, Arithmetic::GradientFactors { scalars, divisor, grad_clip }, into).unwrap();
    values(memory, &factors)
}

fn scalars(losses: &[f64], squares: &[f64], count: i64) -> Vec<i64> {
    let mut words = vec![0; SCALAR_WORDS];
    for (range, values) in [(LOSS, losses), (SQUARED_NORM, squares)] {
        // Add the words of several ranks without propagating carries.
        for value in values {
            let mut sum = ExactSum::default();
            sum.add(*value);
            words[range.clone()].iter_mut().zip(sum.to_words()).for_each(|(word, more)| *word += more);
        }
    }
    words[COUNT] = count;
    words
}

#[test]
fn gradient_factors_match_host_bitwise() {
    let (cuda, host) = (&*subject(), &host());
    let start = GradientFactors::from_array(GradientFactors::START);
    let mut cases = vec![
        scalars(&[3.0, 5.0], &[9.0, 16.0], 4),
        scalars(&[], &[], 0),
        scalars(&[-1e-300, 1.0], &[1e-300], 3),
        scalars(&[f64::NAN], &[1.0], 1),
        scalars(&[1.0], &[f64::INFINITY], 1),
        scalars(&[f64::MAX, f64::MAX], &[1.0], 1),
        scalars(&[5e-324], &[5e-324], 1),
        scalars(&[-3.0], &[f64::MAX, 1.0, 2.0], 7),
    ];
    for case in 0..40 {
        let numbers = wild(100 + case, 12);
        let numbers: Vec<f64> = numbers.into_iter().filter(|value| value.is_finite()).collect();
        let squares: Vec<f64> = numbers.iter().map(|value| value * value).collect();
        cases.push(scalars(&numbers, &squares, 1 + case as i64));
    }
    for (case, words) in cases.iter().enumerate() {
        for grad_clip in [None, Some(1.0), Some(1e-3), Some(0.0)] {
            for divisor in [1.0, 3.0, 8.0, 2.0 / 65536.0] {
                let got = factors(cuda, words, divisor, grad_clip, start);
                let expected = factors(host, words, divisor, grad_clip, start);
                assert_bits(&got, &expected, &format!("case {case} by {divisor} with {grad_clip:?}"));
            }
        }
    }
    let failed = GradientFactors { finite: false, ..start };
    assert_eq!(factors(cuda, &cases[0], 1.0, None, failed)[2], 0.0, "what was not finite once stays so");
    for ranks in [1, 4] {
        let mut words = cases[0].clone();
        words[NOT_FINITE] = ranks;
        for memory in [factors(cuda, &words, 1.0, None, start), factors(host, &words, 1.0, None, start)] {
            assert_eq!(memory, [0.25, 1.0, 0.0], "the state of {ranks} ranks is not finite");
        }
    }
}
