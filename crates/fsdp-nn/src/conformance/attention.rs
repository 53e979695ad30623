//! Tests attention at the sizes that fused kernels support, with its gradients, in every dtype.
//!
//! The reference computes from scores, in double precision, and tracks for each number the permitted error of an
//! implementation: every sum may be taken in any order in the type of arithmetic, and probabilities, their gradients
//! and results may be rounded to the dtype of the operands. A wrong mask, scale, head or position exceeds these
//! bounds by far.

use fsdp_core::DType;

use super::Subject;
use super::calls::Calls;
use super::kit::{Kit, numbers};
use super::precision::unit;
use crate::backend::{AttentionDims, Backend, BatchFacts};
use crate::op::Scores;

const PLAIN: Scores = Scores { dropout: 0.0, scale: None, softcap: None, window: None, packed: false };
const WINDOW: Scores = Scores { window: Some(37), ..PLAIN };
const SCALE: Scores = Scores { scale: Some(0.2), ..PLAIN };

/// Head sizes of real models, positions that do not fill blocks, and both shared and separate keys: samples,
/// positions, query heads, key heads, and elements per head.
const CASES: [(DType, [usize; 5], Scores); 10] = [
    (DType::Bf16, [2, 67, 4, 2, 64], PLAIN),
    (DType::Bf16, [1, 160, 2, 2, 128], PLAIN),
    (DType::Bf16, [1, 131, 3, 1, 128], PLAIN),
    (DType::F32, [2, 67, 2, 2, 64], PLAIN),
    (DType::F32, [1, 160, 4, 2, 64], PLAIN),
    (DType::F32, [1, 160, 4, 2, 64], WINDOW),
    (DType::Bf16, [2, 131, 3, 1, 64], WINDOW),
    (DType::Bf16, [1, 67, 4, 2, 64], SCALE),
    (DType::F16, [1, 131, 3, 1, 128], PLAIN),
    (DType::F16, [2, 67, 4, 2, 64], WINDOW),
];

/// Checks that outputs and gradients of attention are within the bounds of its roundings.
///
/// # Panics
/// If one is not.
pub fn attention_is_precise<M: Backend>(subject: &Subject<'_, M>) {
    for (dtype, [batch, seq, heads, kv_heads, head_dim], scores) in CASES {
        let dims = AttentionDims { batch, seq, heads, kv_heads, head_dim };
        let qkv = numbers(11, dims.rows() * dims.packed());
        let dy = numbers(12, dims.rows() * dims.heads * dims.head_dim);
        let (y, dqkv) = run(&Kit::new((subject.memory)(), dtype), (dims, scores), &qkv, &dy);
        let expected = Reference::new(dtype, (dims, scores), &qkv, &dy).compute();
        compare(dtype, dims, "output", &y, &expected.y);
        compare(dtype, dims, "gradient", &dqkv, &expected.dqkv);
    }
}

fn run<M: Backend>(
    kit: &Kit<M>,
    (dims, scores): (AttentionDims, Scores),
    qkv: &[f64],
    dy: &[f64],
) -> (Vec<f64>, Vec<f64>) {
    let (qkv, dy) = (kit.put(qkv), kit.put(dy));
    let mut y = kit.result(dims.rows() * dims.heads * dims.head_dim);
    let mut lse = kit.statistics(dims.rows() * dims.heads);
    let mut dqkv = kit.result(dims.rows() * dims.packed());
    kit.memory.attention(dims, (scores, BatchFacts::default()), qkv.read(), y.write(), lse.write()).unwrap();
    let (read_y, read_lse) = (y.read(), lse.read());
    let (qkv, dy, facts) = (qkv.read(), dy.read(), (scores, BatchFacts::default()));
    kit.memory.attention_backward(dims, facts, qkv, read_y, read_lse, dy, dqkv.write()).unwrap();
    (kit.get(&y), kit.get(&dqkv))
}

fn compare(dtype: DType, dims: AttentionDims, what: &str, got: &[f64], expected: &[Approximate]) {
    assert_eq!(got.len(), expected.len());
    for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
        let Approximate { value, error } = *expected;
        let found = (got - value).abs();
        assert!(
            found <= error,
            "{what} {at} of attention, {dtype} {dims:?}: {got} for {value}, more than {error}"
        );
    }
}

/// A number with the permitted error of an implementation, to first order.
#[derive(Clone, Copy, Debug, Default)]
struct Approximate {
    value: f64,
    error: f64,
}

impl Approximate {
    fn exact(value: f64) -> Self {
        Self { value, error: 0.0 }
    }

    fn times(self, other: Self) -> Self {
        let error = self.value.abs() * other.error + other.value.abs() * self.error;
        Self { value: self.value * other.value, error }
    }

    fn minus(self, other: Self) -> Self {
        Self { value: self.value - other.value, error: self.error + other.error }
    }

    /// Rounds to nearest.
    fn rounded(self, unit: f64) -> Self {
        Self { error: self.error + unit * (self.value.abs() + self.error), ..self }
    }

    /// A sum in any order, with each partial sum and each term rounded.
    fn sum(unit: f64, terms: impl Iterator<Item = Self>) -> Self {
        let (mut sum, mut magnitude, mut count) = (Self::default(), 0.0, 0.0);
        for term in terms {
            sum = Self { value: sum.value + term.value, error: sum.error + term.error };
            magnitude += term.value.abs() + term.error;
            count += 1.0;
        }
        Self { error: sum.error + (count + 1.0) * unit * magnitude, ..sum }
    }
}

/// The reference computation.
struct Reference<'a> {
    dims: AttentionDims,
    scores: Scores,
    qkv: &'a [f64],
    dy: &'a [f64],
    /// Relative error of one rounding: in the operands' dtype, and in the type of arithmetic.
    stored: f64,
    unit: f64,
    y: Vec<Approximate>,
    dqkv: Vec<Approximate>,
}

impl<'a> Reference<'a> {
    fn new(dtype: DType, (dims, scores): (AttentionDims, Scores), qkv: &'a [f64], dy: &'a [f64]) -> Self {
        let (stored, unit) = (unit(dtype), unit(dtype.master()));
        let y = vec![Approximate::default(); dy.len()];
        Self { dims, scores, qkv, dy, stored, unit, y, dqkv: vec![Approximate::default(); qkv.len()] }
    }

    /// Returns the offset of a head in a packed row: query heads come first, then key heads, then value heads.
    fn packed(&self, row: usize, head: usize) -> usize {
        row * self.dims.packed() + head * self.dims.head_dim
    }

    fn row(&self, at: usize) -> impl Iterator<Item = Approximate> + 'a {
        self.qkv[at..at + self.dims.head_dim].iter().copied().map(Approximate::exact)
    }

    fn dot(&self, a: usize, b: usize) -> Approximate {
        Approximate::sum(self.unit, self.row(a).zip(self.row(b)).map(|(a, b)| a.times(b)))
    }

    fn compute(mut self) -> Self {
        let AttentionDims { batch, heads, kv_heads, .. } = self.dims;
        for (sample, head) in (0..batch).flat_map(|sample| (0..heads).map(move |head| (sample, head))) {
            let kv_head = heads + head / (heads / kv_heads);
            self.head(sample, [head, kv_head, kv_head + kv_heads]);
        }
        // Heads that share keys may have rounded their contributions before adding them.
        let (stored, unit) = (self.stored, self.unit);
        for result in self.y.iter_mut().chain(&mut self.dqkv) {
            *result = result.rounded(stored + heads as f64 * unit);
            result.error = result.error * 1.01 + 1e-30;
        }
        self
    }

    /// Computes output and gradients of one head of a sample.
    fn head(&mut self, sample: usize, [q, k, v]: [usize; 3]) {
        let AttentionDims { seq, heads, head_dim, .. } = self.dims;
        let first = sample * seq;
        let scale = Approximate::exact(self.scores.scale(head_dim)).rounded(self.unit);
        for query in first..first + seq {
            let first_key = first + self.scores.first_key(query - first);
            let (own, to) = (self.packed(query, q), (query * heads + q) * head_dim);
            let keys: Vec<[usize; 2]> =
                (first_key..=query).map(|key| [self.packed(key, k), self.packed(key, v)]).collect();
            let probabilities = self.probabilities(own, &keys, scale);
            let dy: Vec<Approximate> =
                self.dy[to..to + head_dim].iter().copied().map(Approximate::exact).collect();
            let mut delta = Vec::new();
            for (d, &dy) in dy.iter().enumerate() {
                let terms = probabilities
                    .iter()
                    .zip(&keys)
                    .map(|(p, at)| p.rounded(self.stored).times(Approximate::exact(self.qkv[at[1] + d])));
                let y = Approximate::sum(self.unit, terms);
                self.y[to + d] = y;
                delta.push(y.rounded(self.stored).times(dy));
            }
            let delta = Approximate::sum(self.unit, delta.into_iter());
            for (&p, &[key, value]) in probabilities.iter().zip(&keys) {
                let slope = Approximate::sum(self.unit, self.row(value).zip(&dy).map(|(v, &dy)| v.times(dy)));
                let score = p.times(slope.minus(delta)).rounded(self.stored + 2.0 * self.unit).times(scale);
                for (d, &dy) in dy.iter().enumerate() {
                    self.add(own + d, score.times(Approximate::exact(self.qkv[key + d])));
                    self.add(key + d, score.times(Approximate::exact(self.qkv[own + d])));
                    self.add(value + d, p.rounded(self.stored).times(dy));
                }
            }
        }
    }

    /// Returns the probabilities of the keys that a query sees. Their error is that of the exponent: of the score, of
    /// the largest score's share in the log-sum-exp, and of the exponential.
    fn probabilities(&self, own: usize, keys: &[[usize; 2]], scale: Approximate) -> Vec<Approximate> {
        let scores: Vec<Approximate> =
            keys.iter().map(|at| self.dot(own, at[0]).times(scale).rounded(2.0 * self.unit)).collect();
        let top = scores.iter().map(|score| score.value).fold(f64::NEG_INFINITY, f64::max);
        let lse = top + scores.iter().map(|score| (score.value - top).exp()).sum::<f64>().ln();
        let worst = scores.iter().map(|score| score.error).fold(0.0, f64::max);
        let sums = (keys.len() as f64 + 16.0 + lse.abs()) * self.unit;
        let probability = |score: &Approximate| {
            let value = (score.value - lse).exp();
            let exponent = score.error + worst + sums + 4.0 * self.unit * (score.value - lse).abs();
            Approximate { value, error: value * exponent }
        };
        scores.iter().map(probability).collect()
    }

    /// Adds to a gradient; heads and positions may be added in any order, and each head's contribution may be
    /// rounded.
    fn add(&mut self, at: usize, term: Approximate) {
        let rounded = (self.dims.seq * self.dims.heads) as f64 * self.unit + self.stored;
        let sum = &mut self.dqkv[at];
        sum.value += term.value;
        sum.error += term.error + rounded * (term.value.abs() + term.error);
    }
}
