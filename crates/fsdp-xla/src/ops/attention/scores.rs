//! The scores of a block: scaling, capping, masking and dropout.

use fsdp_nn::backend::BatchFacts;
use fsdp_nn::op::{AttentionDims, Scores};

use super::Heads;
use super::block::Block;
use crate::hlo::{Element, Value};
use crate::trace::Trace;

/// Properties common to all scores of a call.
#[derive(Clone, Copy)]
pub(super) struct Rules<'a> {
    pub(super) dims: AttentionDims,
    pub(super) scores: Scores,
    pub(super) batch: BatchFacts<'a>,
}

impl Rules<'_> {
    /// The type in which probabilities weight values: that of the values, or that of arithmetic if scores are capped or
    /// not all seen, or probabilities are dropped, as on other devices.
    pub(super) fn weights_element(&self, values: &Value) -> Element {
        let is_plain = self.scores == Scores { scale: self.scores.scale, ..Scores::default() };
        if is_plain { values.element() } else { values.element().master() }
    }

    /// Scaled, capped and masked scores of a block: sample, key/value head, query head, query, key. Also returns the
    /// slope of the cap, if any.
    pub(super) fn scores(&self, trace: &mut Trace, heads: &Heads, block: &Block) -> (Value, Option<Value>) {
        let Heads { queries, keys, .. } = heads;
        let [samples, kv_heads, heads, positions, _] = queries.dims()[..] else {
            panic!("queries have five dimensions, not {}", queries.shape);
        };
        let x = trace.product(queries, keys, [3, 3], queries.element().master());
        let x = trace.hlo.reshape(&x, &[samples, kv_heads, heads, positions, self.dims.seq]);
        let mut x = trace.hlo.with("multiply", &x, self.scores.scale(self.dims.head_dim));
        let mut slope = None;
        if let Some(cap) = self.scores.softcap {
            let [capped, cap_slope] = trace.capped(&x, cap);
            (x, slope) = (capped, Some(cap_slope));
        }
        let is_seen = self.seen(trace, x.dims(), block);
        let never = trace.hlo.float(f64::NEG_INFINITY, x.dims(), x.element());
        (trace.hlo.select(&is_seen, &x, &never), slope)
    }

    /// The mask: whether a query sees a key.
    fn seen(&self, trace: &mut Trace, sizes: &[usize], block: &Block) -> Value {
        let mut query = trace.hlo.iota(sizes, 3, Element::I32);
        if let Some([_, first]) = &block.at {
            let first = trace.hlo.fill(first, sizes);
            query = trace.hlo.add(&query, &first);
        }
        let key = trace.hlo.iota(sizes, 4, Element::I32);
        let mut is_seen = trace.hlo.compare("GE", &query, &key);
        if let Some(window) = self.scores.window {
            let first = trace.hlo.with_int("subtract", &query, window as i64);
            let is_near = trace.hlo.compare("LT", &first, &key);
            is_seen = trace.hlo.binary("and", &is_seen, &is_near);
        }
        if self.scores.packed {
            let numbers = self.batch.documents.iter().enumerate();
            let of_rows = numbers.flat_map(|(number, rows)| rows.clone().map(move |_| number as u32));
            let documents = trace.input_ints(of_rows);
            let documents = trace.hlo.reshape(&documents, &[self.dims.batch, self.dims.seq]);
            let key = block.samples_of(trace, &documents);
            let key = trace.hlo.broadcast(&key, &[0, 4], sizes);
            let query = trace.hlo.reshape(&documents, &[self.dims.batch, 1, 1, self.dims.seq]);
            let query = block.queries_of(trace, &query);
            let query = trace.hlo.reshape(&query, &[block.samples, block.queries]);
            let query = trace.hlo.broadcast(&query, &[0, 3], sizes);
            let is_same = trace.hlo.compare("EQ", &query, &key);
            is_seen = trace.hlo.binary("and", &is_seen, &is_same);
        }
        is_seen
    }

    /// The dropout factors of a block's probabilities; `None` without dropout.
    pub(super) fn kept(&self, trace: &mut Trace, block: &Block, like: &Value) -> Option<Value> {
        let dropout = self.scores.dropout(self.batch.keys)?;
        let AttentionDims { seq, heads, .. } = self.dims;
        let keys = trace.dropout_keys(dropout).map(|keys| block.samples_of(trace, &keys));
        let factors = match &block.at {
            Some([_, first]) if block.queries < seq => {
                // Within each head of a sample, the block's random numbers belong to consecutive queries.
                let sizes = [block.samples, heads, block.queries * seq / 4];
                let mut of_dim = |dim, each: usize| {
                    let index = trace.hlo.iota(&sizes, dim, Element::U64);
                    trace.hlo.with_int("multiply", &index, each as i64)
                };
                let (head, own) = (of_dim(1, seq * seq / 4), of_dim(2, 1));
                let first = trace.hlo.convert(first, Element::U64);
                let first = trace.hlo.with_int("multiply", &first, seq as i64);
                let first = trace.hlo.with_int("divide", &first, 4);
                let first = trace.hlo.fill(&first, &sizes);
                let counters = trace.hlo.add(&head, &own);
                let counters = trace.hlo.add(&counters, &first);
                let counters = trace.hlo.reshape(&counters, &[sizes[0], sizes[1] * sizes[2]]);
                trace.dropout_factors_at(dropout, keys, &counters, like.element())
            }
            _ => trace.dropout_factors(dropout, keys, heads * seq * seq, like.element()),
        };
        Some(trace.hlo.reshape(&factors, like.dims()))
    }
}

impl Trace {
    /// Broadcasts one number per query to all of its keys.
    pub(super) fn over_keys(&mut self, x: &Value, like: &Value) -> Value {
        self.hlo.broadcast(x, &[0, 1, 2, 3], like.dims())
    }
}
