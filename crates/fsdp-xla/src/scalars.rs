//! The scalars of a step in programs: exact sums as words, and what updates need of them.
//!
//! Sums over ranks stay exact, as everywhere: they are integers. Within a rank a program sums floats of double precision in
//! an order of the compiler's, and adds the one number that comes out to the words ([`ExactSum`]).

use fsdp_core::ExactSum;
use fsdp_core::scalars::{CLIP_EPSILON, COUNT, LOSS, NOT_FINITE, SQUARED_NORM};

use crate::hlo::{Builder, Element, Value};

/// Digits of an exact sum; one word more counts what is not finite.
const DIGITS: usize = ExactSum::WORDS - 1;

/// Squares that are added in single precision before they are converted to double.
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

/// The words of an exact sum with one number of double precision more.
pub(crate) fn add_exactly(hlo: &mut Builder, words: &Value, number: &Value) -> Value {
    let int = Element::I64;
    let bits = hlo.bitcast(number, int);
    let exponent = hlo.with_int("shift_right_logical", &bits, 52);
    let exponent = hlo.with_int("and", &exponent, 0x7ff);
    let fraction = hlo.with_int("and", &bits, (1 << 52) - 1);
    let (none, one) = (hlo.int(0, &[], int), hlo.int(1, &[], int));
    // A subnormal has no hidden bit and shares the exponent of the smallest normal number.
    let is_subnormal = hlo.compare("EQ", &exponent, &none);
    let hidden = hlo.with_int("or", &fraction, 1 << 52);
    let mantissa = hlo.select(&is_subnormal, &fraction, &hidden);
    let shift = hlo.binary("maximum", &exponent, &one);
    let shift = hlo.subtract(&shift, &one);
    let place = hlo.with_int("shift_right_logical", &shift, 5);
    let within = hlo.with_int("and", &shift, 31);
    // The mantissa, moved by less than a digit, in two parts that do not overflow.
    let low = hlo.with_int("and", &mantissa, 0xffff_ffff);
    let low = hlo.binary("shift_left", &low, &within);
    let high = hlo.with_int("shift_right_logical", &mantissa, 32);
    let high = hlo.binary("shift_left", &high, &within);
    let carried = hlo.with_int("shift_right_logical", &low, 32);
    let high = hlo.add(&high, &carried);
    let digits = [
        hlo.with_int("and", &low, 0xffff_ffff),
        hlo.with_int("and", &high, 0xffff_ffff),
        hlo.with_int("shift_right_logical", &high, 32),
    ];
    let infinite = hlo.int(0x7ff, &[], int);
    let is_infinite = hlo.compare("EQ", &exponent, &infinite);
    let is_negative = hlo.compare("LT", &bits, &none);
    let mut sum = words.clone();
    let index = hlo.iota(&[ExactSum::WORDS], 0, int);
    let zeros = hlo.int(0, &[ExactSum::WORDS], int);
    let mut add = |hlo: &mut Builder, digit: &Value, place: &Value| {
        let (digit, place) = (hlo.fill(digit, &[ExactSum::WORDS]), hlo.fill(place, &[ExactSum::WORDS]));
        let is_here = hlo.compare("EQ", &index, &place);
        let spread = hlo.select(&is_here, &digit, &zeros);
        sum = hlo.add(&sum, &spread);
    };
    for (number, digit) in digits.iter().enumerate() {
        let negative = hlo.unary("negate", digit);
        let digit = hlo.select(&is_negative, &negative, digit);
        let digit = hlo.select(&is_infinite, &none, &digit);
        let place = hlo.with_int("add", &place, number as i64);
        add(hlo, &digit, &place);
    }
    let (count, last) = (hlo.convert(&is_infinite, int), hlo.int(DIGITS as i64, &[], int));
    add(hlo, &count, &last);
    sum
}

/// The number that the words of an exact sum stand for, in double precision; none if something was not finite.
fn value_of(hlo: &mut Builder, words: &Value) -> Value {
    // What no number reaches has a weight, too: an infinite one would make zeros of it no numbers.
    let weight = |digit: i32| match 32 * digit - 1074 {
        exponent if exponent > 1023 => f64::MAX,
        exponent => 2f64.powi(exponent),
    };
    let weights: Vec<f64> = (0..DIGITS as i32).map(weight).collect();
    let weights = hlo.floats(&weights, Element::F64);
    let digits = hlo.range(words, 0..DIGITS);
    let digits = hlo.convert(&digits, Element::F64);
    let terms = hlo.multiply(&digits, &weights);
    let sum = hlo.sum(&terms, &[0]);
    let not_finite = word(hlo, words, DIGITS);
    let none = hlo.int(0, &[], Element::I64);
    let is_finite = hlo.compare("EQ", &not_finite, &none);
    let nan = hlo.float(f64::NAN, &[], Element::F64);
    hlo.select(&is_finite, &sum, &nan)
}

/// One word.
fn word(hlo: &mut Builder, words: &Value, index: usize) -> Value {
    let word = hlo.range(words, index..index + 1);
    hlo.reshape(&word, &[])
}

/// [`GradientFactors`](fsdp_core::scalars::GradientFactors) of the reduced scalars of a step, and those of the step before.
pub(crate) fn gradient_factors(
    hlo: &mut Builder,
    words: &Value,
    before: &Value,
    divisor: &Value,
    grad_clip: Option<f64>,
) -> Value {
    let double = Element::F64;
    let (zero, one) = (hlo.float(0.0, &[], double), hlo.float(1.0, &[], double));
    let count = word(hlo, words, COUNT);
    let count = hlo.convert(&count, double);
    let divisor = hlo.reshape(divisor, &[]);
    let scale = hlo.divide(&divisor, &count);
    let is_counted = hlo.compare("GT", &count, &zero);
    let scale = hlo.select(&is_counted, &scale, &zero);
    let of = |hlo: &mut Builder, range: std::ops::Range<usize>| {
        let words = hlo.slice(words, &[range]);
        value_of(hlo, &words)
    };
    let loss = of(hlo, LOSS);
    let squares = of(hlo, SQUARED_NORM);
    let norm = hlo.unary("sqrt", &squares);
    let norm = hlo.multiply(&norm, &scale);
    let clip = match grad_clip {
        None => one.clone(),
        Some(most) => {
            let (norm, most) = (hlo.with("add", &norm, CLIP_EPSILON), hlo.float(most, &[], double));
            let clip = hlo.divide(&most, &norm);
            hlo.binary("minimum", &clip, &one)
        }
    };
    // Infinite, or no number, if one of the two is.
    let both = hlo.add(&loss, &norm);
    let both = hlo.unary("abs", &both);
    let infinity = hlo.float(f64::INFINITY, &[], double);
    let is_finite = hlo.compare("LT", &both, &infinity);
    let note = word(hlo, words, NOT_FINITE);
    let nobody = hlo.int(0, &[], Element::I64);
    let is_sound = hlo.compare("EQ", &note, &nobody);
    let was_finite = hlo.range(before, 2..3);
    let was_finite = hlo.reshape(&was_finite, &[]);
    let finite = hlo.select(&is_finite, &was_finite, &zero);
    let finite = hlo.select(&is_sound, &finite, &zero);
    let parts = [scale, clip, finite].map(|factor| hlo.reshape(&factor, &[1]));
    hlo.concatenate(&parts, 0)
}
