//! Dropout: the generator of [`fsdp_nn::random`] in integer operations, so that masks match all other devices.

use fsdp_nn::op::Dropout;

use crate::hlo::{Builder, Element, Value};
use crate::trace::Trace;

/// Multipliers and key increments of Philox4x32-10.
const MULTIPLIERS: [i64; 2] = [0xd251_1f53, 0xcd9e_8d57];
const WEYL: [i64; 2] = [0x9e37_79b9, 0xbb67_ae85];
const ROUNDS: usize = 10;

impl Trace {
    /// The two halves of each sample's key, as arguments.
    pub(super) fn dropout_keys(&mut self, dropout: Dropout<'_>) -> [Value; 2] {
        [0, 32].map(|shift| self.input_ints(dropout.keys.iter().map(|&key| (key >> shift) as u32)))
    }

    /// The dropout factors of each sample's first `count` elements: 0, or the scale that compensates for dropped ones.
    pub(super) fn dropout_factors(
        &mut self,
        dropout: Dropout<'_>,
        keys: [Value; 2],
        count: usize,
        element: Element,
    ) -> Value {
        let (hlo, sizes) = (&mut self.hlo, [keys[0].len(), count.div_ceil(4)]);
        let counters = [hlo.iota(&sizes, 1, Element::U32), hlo.int(0, &sizes, Element::U32)];
        let words = words(hlo, keys, counters);
        let words = hlo.slice(&words, &[0..sizes[0], 0..count]);
        self.kept_or_zero(dropout, &words, element)
    }

    /// The dropout factors for these generator blocks of each sample.
    pub(super) fn dropout_factors_at(
        &mut self,
        dropout: Dropout<'_>,
        keys: [Value; 2],
        blocks: &Value,
        element: Element,
    ) -> Value {
        let hlo = &mut self.hlo;
        let high = hlo.with_int("shift_right_logical", blocks, 32);
        let counters = [blocks, &high].map(|half| hlo.convert(half, Element::U32));
        let words = words(hlo, keys, counters);
        self.kept_or_zero(dropout, &words, element)
    }

    fn kept_or_zero(&mut self, dropout: Dropout<'_>, words: &Value, element: Element) -> Value {
        let hlo = &mut self.hlo;
        let threshold = hlo.int(i64::from(dropout.threshold()), words.dims(), Element::U32);
        let is_dropped = hlo.compare("LT", words, &threshold);
        let zero = hlo.zeros(words.dims(), element);
        let kept = hlo.float(dropout.kept(), words.dims(), element);
        hlo.select(&is_dropped, &zero, &kept)
    }
}

/// The four words of each block, for each key; block numbers are given as two halves.
fn words(hlo: &mut Builder, keys: [Value; 2], counters: [Value; 2]) -> Value {
    let dims = [counters[0].dims()[0], counters[0].dims()[1]];
    let mut keys = keys.map(|key| hlo.broadcast(&key, &[0], &dims));
    let zero = hlo.int(0, &dims, Element::U32);
    let [low, high] = counters;
    let mut x = [low, high, zero.clone(), zero];
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

/// The high and low halves of a product.
fn product(hlo: &mut Builder, x: &Value, multiplier: i64) -> [Value; 2] {
    let wide = hlo.convert(x, Element::U64);
    let product = hlo.with_int("multiply", &wide, multiplier);
    let high = hlo.with_int("shift_right_logical", &product, 32);
    [hlo.convert(&high, Element::U32), hlo.convert(&product, Element::U32)]
}
