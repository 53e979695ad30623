//! The scalars of a step in programs: exact sums as words, and the factors that updates derive from them.
//!
//! Sums over ranks stay exact, as on all devices: they are integers. Within a rank, a program sums doubles in an order
//! of the compiler's choice and adds the resulting number to the words ([`ExactSum`]).
//!
//! TPUs have no double precision. XLA emulates it with two single-precision floats (xla/ef57.h): about 48 bits, and the
//! range of a single one. A constant outside that range would become infinite, so there is none here, digit weights
//! included.

use std::ops::Range;

use fsdp_core::ExactSum;
use fsdp_core::scalars::{CLIP_EPSILON, COUNT, LOSS, NOT_FINITE, SQUARED_NORM};

use crate::hlo::{Builder, Element, Value};

/// The digits of an exact sum that programs compute: those of numbers from 2^-114 up to [`MAGNITUDE_LIMIT`].
const DIGITS: Range<usize> = 30..38;

/// Numbers of at least this size count as not finite.
const MAGNITUDE_LIMIT: f64 = (1u128 << 127) as f64;

/// The weight of a digit.
fn weight(digit: usize) -> f64 {
    2f64.powi(32 * digit as i32 - 1074)
}

/// The word of an exact sum that counts non-finite summands.
const NOT_FINITE_WORD: usize = ExactSum::WORDS - 1;

/// Number of squares added in single precision before conversion to double.
const ROW: usize = 16;

/// The sum of the squares of a vector, in double precision.
pub(crate) fn square_sum(hlo: &mut Builder, x: &Value) -> Value {
    let x = hlo.master(x);
    let squares = hlo.multiply(&x, &x);
    let rows = match x.len() % ROW {
        0 => {
            let rows = hlo.reshape(&squares, &[x.len() / ROW, ROW]);
            hlo.sum(&rows, &[1])
        }
        _ => squares,
    };
    let rows = hlo.convert(&rows, Element::F64);
    hlo.sum(&rows, &[0])
}

/// Adds one number to the words of an exact sum. Its bits below the lowest of [`DIGITS`] are dropped.
pub(crate) fn add_exactly(hlo: &mut Builder, words: &Value, number: &Value) -> Value {
    let (int, float) = (Element::I64, number.element());
    let (magnitude, limit) = (hlo.unary("abs", number), hlo.float(MAGNITUDE_LIMIT, &[], float));
    let zero = hlo.float(0.0, &[], float);
    // NaN does not compare as less either.
    let is_finite = hlo.compare("LT", &magnitude, &limit);
    let magnitude = hlo.select(&is_finite, &magnitude, &zero);
    let digits = digits(hlo, &magnitude);
    let (negative, is_negative) = (hlo.unary("negate", &digits), hlo.compare("LT", number, &zero));
    let digits = hlo.select(&is_negative, &negative, &digits);
    let (count, one) = (hlo.convert(&is_finite, int), hlo.int(1, &[], int));
    let not_finite = hlo.subtract(&one, &count);
    let not_finite = hlo.reshape(&not_finite, &[1]);
    let (below, above) = (hlo.zeros(&[DIGITS.start], int), hlo.zeros(&[NOT_FINITE_WORD - DIGITS.end], int));
    let addends = hlo.concatenate(&[below, digits, above, not_finite], 0);
    hlo.add(words, &addends)
}

/// All of [`DIGITS`] of a non-negative number below [`MAGNITUDE_LIMIT`].
fn digits(hlo: &mut Builder, number: &Value) -> Value {
    let float = number.element();
    let number = hlo.fill(number, &[DIGITS.len()]);
    // The part above a digit is a multiple of the next digit's weight. The highest digit has nothing above it.
    let next = |digit: usize| if digit + 1 == DIGITS.end { 0.0 } else { weight(digit + 1) };
    let reciprocal = |weight: f64| if weight == 0.0 { 0.0 } else { weight.recip() };
    let (weights, scales): (Vec<f64>, Vec<f64>) =
        DIGITS.map(next).map(|weight| (weight, reciprocal(weight))).unzip();
    let (weights, scales) = (hlo.floats(&weights, float), hlo.floats(&scales, float));
    let above = hlo.multiply(&number, &scales);
    let higher = hlo.unary("floor", &above);
    let higher = hlo.multiply(&higher, &weights);
    let rest = hlo.subtract(&number, &higher);
    let scales: Vec<f64> = DIGITS.map(weight).map(f64::recip).collect();
    let scales = hlo.floats(&scales, float);
    let digits = hlo.multiply(&rest, &scales);
    let digits = hlo.unary("floor", &digits);
    // If the number is at least 2^53 times the next digit's weight, double precision has no bits as low as this digit,
    // and `above` may have overflowed.
    let bits = hlo.float(2f64.powi(53), &[DIGITS.len()], float);
    let (has_bits, zeros) = (hlo.compare("LT", &above, &bits), hlo.zeros(&[DIGITS.len()], float));
    let digits = hlo.select(&has_bits, &digits, &zeros);
    hlo.convert(&digits, Element::I64)
}

/// The value of an exact sum's words, as a `float`; NaN if a summand was not finite.
fn value_of(hlo: &mut Builder, words: &Value, float: Element) -> Value {
    let weights: Vec<f64> = DIGITS.map(weight).collect();
    let weights = hlo.floats(&weights, float);
    let digits = hlo.range(words, DIGITS);
    let digits = hlo.convert(&digits, float);
    let terms = hlo.multiply(&digits, &weights);
    let sum = hlo.sum(&terms, &[0]);
    let not_finite = word(hlo, words, NOT_FINITE_WORD);
    let zero = hlo.int(0, &[], Element::I64);
    let is_finite = hlo.compare("EQ", &not_finite, &zero);
    let nan = hlo.float(f64::NAN, &[], float);
    hlo.select(&is_finite, &sum, &nan)
}

/// Returns one word as a scalar.
fn word(hlo: &mut Builder, words: &Value, index: usize) -> Value {
    let word = hlo.range(words, index..index + 1);
    hlo.reshape(&word, &[])
}

/// [`GradientFactors`](fsdp_core::scalars::GradientFactors) from the reduced scalars of a step and the factors of the
/// step before.
pub(crate) fn gradient_factors(
    hlo: &mut Builder,
    words: &Value,
    previous: &Value,
    divisor: &Value,
    grad_clip: Option<f64>,
) -> Value {
    let double = divisor.element();
    let (zero, one) = (hlo.float(0.0, &[], double), hlo.float(1.0, &[], double));
    let count = word(hlo, words, COUNT);
    let count = hlo.convert(&count, double);
    let divisor = hlo.reshape(divisor, &[]);
    let scale = hlo.divide(&divisor, &count);
    let is_counted = hlo.compare("GT", &count, &zero);
    let scale = hlo.select(&is_counted, &scale, &zero);
    let value_in = |hlo: &mut Builder, range: std::ops::Range<usize>| {
        let words = hlo.slice(words, &[range]);
        value_of(hlo, &words, double)
    };
    let loss = value_in(hlo, LOSS);
    let squares = value_in(hlo, SQUARED_NORM);
    let norm = hlo.unary("sqrt", &squares);
    let norm = hlo.multiply(&norm, &scale);
    let clip = match grad_clip {
        None => one.clone(),
        Some(max_norm) => {
            let (norm, max_norm) = (hlo.with("add", &norm, CLIP_EPSILON), hlo.float(max_norm, &[], double));
            let clip = hlo.divide(&max_norm, &norm);
            hlo.binary("minimum", &clip, &one)
        }
    };
    // Infinite or NaN if either of the two is.
    let both = hlo.add(&loss, &norm);
    let both = hlo.unary("abs", &both);
    let infinity = hlo.float(f64::INFINITY, &[], double);
    let is_finite = hlo.compare("LT", &both, &infinity);
    let note = word(hlo, words, NOT_FINITE);
    let none = hlo.int(0, &[], Element::I64);
    let state_is_finite = hlo.compare("EQ", &note, &none);
    let was_finite = hlo.range(previous, 2..3);
    let was_finite = hlo.reshape(&was_finite, &[]);
    let finite = hlo.select(&is_finite, &was_finite, &zero);
    let finite = hlo.select(&state_is_finite, &finite, &zero);
    let parts = [scale, clip, finite].map(|factor| hlo.reshape(&factor, &[1]));
    hlo.concatenate(&parts, 0)
}
