//! Dropout: the generator of [`fsdp_nn::random`], in integers, so that masks are those of all devices.

use fsdp_nn::op::Dropout;

use crate::hlo::{Builder, Element, Value};
use crate::trace::Trace;

/// Multipliers and key increments of Philox4x32-10.
const MULTIPLIERS: [i64; 2] = [0xd251_1f53, 0xcd9e_8d57];
const WEYL: [i64; 2] = [0x9e37_79b9, 0xbb67_ae85];
const ROUNDS: usize = 10;

impl Trace {
    /// What so many elements of each sample are multiplied with: 0, or what makes up for those that are dropped. The keys are
    /// an argument.
    pub(super) fn dropout_factors(&mut self, dropout: Dropout<'_>, count: usize, element: Element) -> Value {
        let samples = dropout.keys.len();
        let low = self.input_ints(dropout.keys.iter().map(|&key| key as u32));
        let high = self.input_ints(dropout.keys.iter().map(|&key| (key >> 32) as u32));
        let (hlo, blocks) = (&mut self.hlo, count.div_ceil(4));
        let keys = [low, high].map(|key| hlo.broadcast(&key, &[0], &[samples, blocks]));
        let words = words(hlo, keys, [samples, blocks]);
        let words = hlo.slice(&words, &[0..samples, 0..count]);
        let threshold = hlo.int(i64::from(dropout.threshold()), words.dims(), Element::U32);
        let is_dropped = hlo.compare("LT", &words, &threshold);
        let zero = hlo.zeros(words.dims(), element);
        let kept = hlo.float(dropout.kept(), words.dims(), element);
        hlo.select(&is_dropped, &zero, &kept)
    }
}

/// Four words of each block `0 ..`, for each key.
fn words(hlo: &mut Builder, mut keys: [Value; 2], dims: [usize; 2]) -> Value {
    let counter = hlo.iota(&dims, 1, Element::U32);
    let zero = hlo.int(0, &dims, Element::U32);
    let mut x = [counter, zero.clone(), zero.clone(), zero];
    for _ in 0..ROUNDS {
        let first = product(hlo, &x[0], MULTIPLIERS[0]);
        let second = product(hlo, &x[2], MULTIPLIERS[1]);
        let mixed = |hlo: &mut Builder, high: &Value, word: &Value, key: &Value| {
            let mixed = hlo.binary("xor", high, word);
            hlo.binary("xor", &mixed, key)
        };
        let a = mixed(hlo, &second[0], &x[1], &keys[0]);
        let b = mixed(hlo, &first[0], &x[3], &keys[1]);
        let ([_, first], [_, second]) = (first, second);
        x = [a, second, b, first];
        keys = [hlo.with_int("add", &keys[0], WEYL[0]), hlo.with_int("add", &keys[1], WEYL[1])];
    }
    let x = x.map(|word| hlo.reshape(&word, &[dims[0], dims[1], 1]));
    let words = hlo.concatenate(&x, 2);
    hlo.reshape(&words, &[dims[0], 4 * dims[1]])
}

/// The upper and the lower half of a product.
fn product(hlo: &mut Builder, x: &Value, multiplier: i64) -> [Value; 2] {
    let wide = hlo.convert(x, Element::U64);
    let product = hlo.with_int("multiply", &wide, multiplier);
    let high = hlo.with_int("shift_right_logical", &product, 32);
    [hlo.convert(&high, Element::U32), hlo.convert(&product, Element::U32)]
}
