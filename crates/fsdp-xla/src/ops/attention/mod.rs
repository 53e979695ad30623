//! Causal attention over packed projections, and their rotation.
//!
//! XLA has no operation of attention. Scores are made [block](block) by block, in a loop, where all at once would take too much
//! memory: as by Rabe and Staats (2021), but with all keys of a query at once, whose softmax therefore is the usual one.

mod backward;
mod block;
mod forward;
mod rope;
mod scores;

use fsdp_nn::op::{Attention, AttentionDims};

use super::Call;
use crate::hlo::Value;
use crate::trace::Trace;

pub(crate) use block::SCORES_MAX_BYTES;

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

    fn heads(&mut self, dims: AttentionDims, qkv: &Value) -> Heads {
        let AttentionDims { batch, seq, heads, kv_heads, head_dim } = dims;
        let x = self.hlo.reshape(qkv, &[batch, seq, heads + 2 * kv_heads, head_dim]);
        let mut of = |range| self.hlo.slice(&x, &[0..batch, 0..seq, range, 0..head_dim]);
        let queries = of(0..heads);
        let (keys, values) = (of(heads..heads + kv_heads), of(heads + kv_heads..heads + 2 * kv_heads));
        let queries = self.hlo.reshape(&queries, &[batch, seq, kv_heads, heads / kv_heads, head_dim]);
        Heads { queries, keys, values }
    }
}
