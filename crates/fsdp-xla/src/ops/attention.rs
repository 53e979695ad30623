//! Causal attention over packed projections, and their rotation.
//!
//! Scores of all pairs are in memory at once, in the compiler's hands: XLA has no operation of attention.

use fsdp_core::memory::SliceMut;
use fsdp_nn::backend::BatchFacts;
use fsdp_nn::layer::Rope;
use fsdp_nn::op::{Attention, AttentionDims, Scores};

use super::{Call, QUEUE};
use crate::buffer::XlaBuffer;
use crate::hlo::{Element, Product, Value};
use crate::trace::Trace;

/// Queries, keys and values; dimensions are sample, position, key/value head, (query head of it,) element.
struct Heads {
    queries: Value,
    keys: Value,
    values: Value,
}

impl Trace {
    pub(super) fn attention(&mut self, op: &Attention, operands: Call<'_, '_>) {
        match op {
            Attention::Rope { dims, rope, packed, backward } => {
                let positions = packed.then(|| self.read(operands.reads[0]));
                let ([], [qkv], _) = operands.split();
                self.rope(*dims, rope, positions, *backward, &qkv.slice);
            }
            Attention::Forward { dims, scores } => self.attend(*dims, *scores, operands),
            Attention::Backward { dims, scores } => self.attend_backward(*dims, *scores, operands),
        }
    }

    fn rope(
        &mut self,
        dims: AttentionDims,
        rope: &Rope,
        positions: Option<Value>,
        backward: bool,
        qkv: &SliceMut<'_, XlaBuffer>,
    ) {
        let AttentionDims { batch, seq, heads, kv_heads, head_dim } = dims;
        let (all, rotated, half) = (heads + 2 * kv_heads, heads + kv_heads, rope.rotary_dim() / 2);
        let x = self.load(QUEUE, qkv.as_slice());
        let master = x.element().master();
        let [cosines, sines] = self.angles(dims, rope, positions, master);
        let sines = if backward { self.hlo.unary("negate", &sines) } else { sines };
        let spread = |trace: &mut Trace, table: &Value| {
            trace.hlo.broadcast(table, &[0, 1, 3], &[batch, seq, rotated, half])
        };
        let (cosines, sines) = (spread(self, &cosines), spread(self, &sines));
        let x = self.hlo.reshape(&x, &[batch, seq, all, head_dim]);
        let of = |trace: &mut Trace, elements| {
            let part = trace.hlo.slice(&x, &[0..batch, 0..seq, 0..rotated, elements]);
            trace.hlo.master(&part)
        };
        let (low, high) = (of(self, 0..half), of(self, half..2 * half));
        let (a, b) = (self.hlo.multiply(&low, &cosines), self.hlo.multiply(&high, &sines));
        let first = self.hlo.subtract(&a, &b);
        let (a, b) = (self.hlo.multiply(&high, &cosines), self.hlo.multiply(&low, &sines));
        let second = self.hlo.add(&a, &b);
        let mut parts = vec![self.hlo.convert(&first, x.element()), self.hlo.convert(&second, x.element())];
        if 2 * half < head_dim {
            parts.push(self.hlo.slice(&x, &[0..batch, 0..seq, 0..rotated, 2 * half..head_dim]));
        }
        let turned = self.hlo.concatenate(&parts, 3);
        let values = self.hlo.slice(&x, &[0..batch, 0..seq, rotated..all, 0..head_dim]);
        let all = self.hlo.concatenate(&[turned, values], 2);
        self.store(QUEUE, qkv, &all);
    }

    /// Cosines and sines of each sample, position and frequency. As everywhere, an angle is rounded to single precision, and
    /// its functions are those of double precision.
    fn angles(
        &mut self,
        dims: AttentionDims,
        rope: &Rope,
        positions: Option<Value>,
        element: Element,
    ) -> [Value; 2] {
        let (hlo, half) = (&mut self.hlo, rope.rotary_dim() / 2);
        let sizes = [dims.batch, dims.seq, half];
        let positions = match positions {
            Some(positions) => hlo.reshape(&positions, &sizes[..2]),
            None => hlo.iota(&sizes[..2], 1, Element::U32),
        };
        let positions = hlo.convert(&positions, Element::F32);
        let positions = hlo.broadcast(&positions, &[0, 1], &sizes);
        let frequencies: Vec<f64> = rope.inverse_frequencies.iter().map(|&one| f64::from(one)).collect();
        let frequencies = hlo.floats(&frequencies, Element::F32);
        let frequencies = hlo.broadcast(&frequencies, &[2], &sizes);
        let angles = hlo.multiply(&positions, &frequencies);
        let angles = hlo.convert(&angles, Element::F64);
        ["cosine", "sine"].map(|function| {
            let values = hlo.unary(function, &angles);
            let values = hlo.with("multiply", &values, rope.factor);
            hlo.convert(&values, element)
        })
    }

    fn heads(&mut self, dims: AttentionDims, qkv: &Value) -> Heads {
        let AttentionDims { batch, seq, heads, kv_heads, head_dim } = dims;
        let x = self.hlo.reshape(qkv, &[batch, seq, heads + 2 * kv_heads, head_dim]);
        let mut of = |range| self.hlo.slice(&x, &[0..batch, 0..seq, range, 0..head_dim]);
        let queries = of(0..heads);
        let (keys, values) = (of(heads..heads + kv_heads), of(heads + kv_heads..heads + 2 * kv_heads));
        let queries = self.hlo.reshape(&queries, &[batch, seq, kv_heads, heads / kv_heads, head_dim]);
        Heads { queries, keys, values }
    }

    /// Scaled, capped and masked scores: sample, key/value head, query, query head, key. With them the slope of the cap.
    fn scores(
        &mut self,
        dims: AttentionDims,
        scores: Scores,
        heads: &Heads,
        batch: BatchFacts<'_>,
    ) -> (Value, Option<Value>) {
        let Heads { queries, keys, .. } = heads;
        let product = Product { batch: [&[0, 2], &[0, 2]], contract: [&[4], &[3]] };
        let x = self.hlo.dot(queries, keys, product, queries.element().master());
        let mut x = self.hlo.with("multiply", &x, scores.scale(dims.head_dim));
        let mut slope = None;
        if let Some(cap) = scores.softcap {
            let [capped, bend] = self.capped(&x, cap);
            (x, slope) = (capped, Some(bend));
        }
        let is_seen = self.seen(&x, scores, dims, batch);
        let never = self.hlo.float(f64::NEG_INFINITY, x.dims(), x.element());
        (self.hlo.select(&is_seen, &x, &never), slope)
    }

    /// Which key a query sees.
    fn seen(&mut self, x: &Value, scores: Scores, dims: AttentionDims, batch: BatchFacts<'_>) -> Value {
        let sizes = x.dims();
        let query = self.hlo.iota(sizes, 2, Element::I32);
        let key = self.hlo.iota(sizes, 4, Element::I32);
        let mut is_seen = self.hlo.compare("GE", &query, &key);
        if let Some(window) = scores.window {
            let first = self.hlo.with_int("subtract", &query, window as i64);
            let is_near = self.hlo.compare("LT", &first, &key);
            is_seen = self.hlo.binary("and", &is_seen, &is_near);
        }
        if scores.packed {
            let numbers = batch.documents.iter().enumerate();
            let of_rows = numbers.flat_map(|(number, rows)| rows.clone().map(move |_| number as u32));
            let documents = self.input_ints(of_rows);
            let documents = self.hlo.reshape(&documents, &[dims.batch, dims.seq]);
            let query = self.hlo.broadcast(&documents, &[0, 2], sizes);
            let key = self.hlo.broadcast(&documents, &[0, 4], sizes);
            let is_same = self.hlo.compare("EQ", &query, &key);
            is_seen = self.hlo.binary("and", &is_seen, &is_same);
        }
        is_seen
    }

    /// What probabilities are multiplied with, if any are dropped.
    fn kept(
        &mut self,
        dims: AttentionDims,
        scores: Scores,
        batch: BatchFacts<'_>,
        like: &Value,
    ) -> Option<Value> {
        let dropout = scores.dropout(batch.keys)?;
        let AttentionDims { batch, seq, heads, kv_heads, .. } = dims;
        let factors = self.dropout_factors(dropout, heads * seq * seq, like.element());
        let factors = self.hlo.reshape(&factors, &[batch, kv_heads, heads / kv_heads, seq, seq]);
        Some(self.hlo.transpose(&factors, &[0, 1, 3, 2, 4]))
    }

    /// The type in which probabilities weight values: theirs, or, where scores are capped or not all seen, or probabilities
    /// are dropped, that of arithmetic, as on other devices.
    fn weighting(&self, scores: Scores, values: &Value) -> Element {
        let is_plain = scores == Scores { scale: scores.scale, ..Scores::default() };
        if is_plain { values.element() } else { values.element().master() }
    }

    fn over_keys(&mut self, x: &Value, like: &Value) -> Value {
        self.hlo.broadcast(x, &[0, 1, 2, 3], like.dims())
    }

    fn attend(&mut self, dims: AttentionDims, scores: Scores, operands: Call<'_, '_>) {
        let batch = operands.batch;
        let ([qkv], [y, lse], _) = operands.split();
        let qkv = self.read(qkv);
        let heads = self.heads(dims, &qkv);
        let (x, _) = self.scores(dims, scores, &heads, batch);
        let largest = self.hlo.reduce("maximum", &x, &[4]);
        let wide = self.over_keys(&largest, &x);
        let exponents = self.hlo.subtract(&x, &wide);
        let exponentials = self.hlo.unary("exponential", &exponents);
        let sums = self.hlo.reduce("add", &exponentials, &[4]);
        let logarithms = self.hlo.unary("log", &sums);
        let logarithms = self.hlo.add(&logarithms, &largest);
        let logarithms = self.hlo.transpose(&logarithms, &[0, 1, 3, 2]);
        self.write(&lse, &logarithms);
        let sums = self.over_keys(&sums, &x);
        let mut weights = self.hlo.divide(&exponentials, &sums);
        if let Some(kept) = self.kept(dims, scores, batch, &weights) {
            weights = self.hlo.multiply(&weights, &kept);
        }
        let element = self.weighting(scores, &heads.values);
        let (weights, values) =
            (self.hlo.convert(&weights, element), self.hlo.convert(&heads.values, element));
        let product = Product { batch: [&[0, 1], &[0, 2]], contract: [&[4], &[1]] };
        let out = self.hlo.dot(&weights, &values, product, element.master());
        let out = self.hlo.convert(&out, heads.values.element());
        let out = self.hlo.transpose(&out, &[0, 2, 1, 3, 4]);
        self.write(&y, &out);
    }

    fn attend_backward(&mut self, dims: AttentionDims, scores: Scores, operands: Call<'_, '_>) {
        let AttentionDims { batch: samples, seq, heads: count, kv_heads, head_dim } = dims;
        let batch = operands.batch;
        let ([qkv, y, lse, dy], [dqkv], _) = operands.split();
        let [qkv, y, dy] = [qkv, y, dy].map(|slice| self.read(slice));
        // Scores are made again, behind a gradient that forward does not have: else those of forward are kept.
        let qkv = self.hlo.behind(&qkv, &dy);
        let heads = self.heads(dims, &qkv);
        let (element, master) = (heads.queries.element(), heads.queries.element().master());
        let (x, slope) = self.scores(dims, scores, &heads, batch);
        let lse = self.read_master(lse);
        let lse = self.hlo.reshape(&lse, &[samples, kv_heads, count / kv_heads, seq]);
        let lse = self.hlo.transpose(&lse, &[0, 1, 3, 2]);
        let lse = self.over_keys(&lse, &x);
        let exponents = self.hlo.subtract(&x, &lse);
        let weights = self.hlo.unary("exponential", &exponents);
        let [y, dy] = [y, dy].map(|value| self.hlo.reshape(&value, heads.queries.dims()));
        // What a probability's gradient is less: the sum of all, each times its probability.
        let (wide_y, wide_dy) = (self.hlo.master(&y), self.hlo.master(&dy));
        let products = self.hlo.multiply(&wide_y, &wide_dy);
        let own = self.hlo.reduce("add", &products, &[4]);
        let own = self.hlo.transpose(&own, &[0, 2, 1, 3]);
        let over_elements = Product { batch: [&[0, 2], &[0, 2]], contract: [&[4], &[3]] };
        let mut slopes = self.hlo.dot(&dy, &heads.values, over_elements, master);
        let mut used = weights.clone();
        if let Some(kept) = self.kept(dims, scores, batch, &weights) {
            slopes = self.hlo.multiply(&slopes, &kept);
            used = self.hlo.multiply(&used, &kept);
        }
        let own = self.over_keys(&own, &slopes);
        let slopes = self.hlo.subtract(&slopes, &own);
        let mut slopes = self.hlo.multiply(&slopes, &weights);
        if let Some(slope) = slope {
            slopes = self.hlo.multiply(&slopes, &slope);
        }
        let slopes = self.hlo.with("multiply", &slopes, scores.scale(head_dim));
        let slopes = self.hlo.convert(&slopes, element);
        let weighting = self.weighting(scores, &heads.values);
        let (used, dy) = (self.hlo.convert(&used, weighting), self.hlo.convert(&dy, weighting));
        let over_keys = Product { batch: [&[0, 1], &[0, 2]], contract: [&[4], &[1]] };
        let over_queries = Product { batch: [&[0, 1], &[0, 2]], contract: [&[2, 3], &[1, 3]] };
        let dqueries = self.hlo.dot(&slopes, &heads.keys, over_keys, master);
        let dqueries = self.hlo.convert(&dqueries, element);
        let dqueries = self.hlo.transpose(&dqueries, &[0, 2, 1, 3, 4]);
        let dqueries = self.hlo.reshape(&dqueries, &[samples, seq, count, head_dim]);
        let [dkeys, dvalues] = [(&slopes, &heads.queries), (&used, &dy)].map(|(a, b)| {
            let product = self.hlo.dot(a, b, over_queries, master);
            let product = self.hlo.convert(&product, element);
            self.hlo.transpose(&product, &[0, 2, 1, 3])
        });
        let all = self.hlo.concatenate(&[dqueries, dkeys, dvalues], 2);
        self.write(&dqkv, &all);
    }
}
