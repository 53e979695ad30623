//! Rotary embeddings of queries and keys.

use fsdp_core::memory::SliceMut;
use fsdp_nn::layer::Rope;
use fsdp_nn::op::AttentionDims;

use super::super::QUEUE;
use crate::buffer::XlaBuffer;
use crate::hlo::{Element, Value};
use crate::trace::Trace;

impl Trace {
    pub(super) fn rope(
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

    /// Cosines and sines for each sample, position and frequency. As on all devices, an angle is rounded to single
    /// precision, and its cosine and sine are computed in double precision.
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
}
