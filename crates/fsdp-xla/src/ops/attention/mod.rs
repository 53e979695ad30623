//! Causal attention over packed projections, and rotary embeddings.
//!
//! XLA has no attention operation. Scores are computed block by block in a loop if all of them would take too much
//! memory: as by Rabe and Staats (2021), but with all keys of a query at once, so that the softmax is the ordinary one.

mod backward;
mod block;
mod forward;
mod rope;
mod scores;
mod sinks;

use fsdp_nn::op::{Attention, AttentionDims};

use super::Call;
use crate::hlo::{Element, Product, Value};
use crate::trace::Trace;

/// Queries, keys and values; dimensions are sample, key/value head, (query head within it,) position, element. So
/// products are of contiguous matrices, and the program never transposes anything as large as the scores.
struct Heads {
    queries: Value,
    keys: Value,
    values: Value,
}

impl Trace {
    pub(super) fn attention(&mut self, op: &Attention, operands: Call<'_, '_>) {
        match op {
            Attention::Rope { dims, rope, positions, backward } => {
                let positions = positions.map(|_| self.read(operands.reads[0]));
                let ([], [qkv], _) = operands.split();
                self.rope(*dims, rope, positions, *backward, &qkv.slice);
            }
            Attention::Forward { dims, scores } => self.attend(*dims, *scores, operands),
            Attention::Backward { dims, scores } => self.attend_backward(*dims, *scores, operands),
            Attention::Sink { dims } => self.sink(*dims, operands),
            Attention::SinkBackward { dims } => self.sink_backward(*dims, operands),
        }
    }

    fn heads(&mut self, dims: AttentionDims, qkv: &Value) -> Heads {
        let AttentionDims { batch, seq, heads, kv_heads, head_dim } = dims;
        let x = self.hlo.reshape(qkv, &[batch, seq, heads + 2 * kv_heads, head_dim]);
        let mut of = |range| self.hlo.slice(&x, &[0..batch, 0..seq, range, 0..head_dim]);
        let queries = of(0..heads);
        let (keys, values) = (of(heads..heads + kv_heads), of(heads + kv_heads..heads + 2 * kv_heads));
        let queries = self.by_head(dims, &queries);
        let [keys, values] = [keys, values].map(|x| self.hlo.transpose(&x, &[0, 2, 1, 3]));
        Heads { queries, keys, values }
    }

    /// Reorders the elements of each query to the layout of [`Heads::queries`].
    fn by_head(&mut self, dims: AttentionDims, x: &Value) -> Value {
        let AttentionDims { batch, seq, heads, kv_heads, head_dim } = dims;
        let x = self.hlo.reshape(x, &[batch, seq, kv_heads, heads / kv_heads, head_dim]);
        self.hlo.transpose(&x, &[0, 2, 3, 1, 4])
    }

    /// Reorders back to rows: sample, position, key/value head, query head, element.
    fn by_row(&mut self, x: &Value) -> Value {
        self.hlo.transpose(x, &[0, 3, 1, 2, 4])
    }

    /// The product of two matrices for each sample and key/value head, contracted over one dimension of each.
    /// Five-dimensional operands (per query) have a row for each query of each query head.
    fn product(&mut self, a: &Value, b: &Value, contracted: [usize; 2], element: Element) -> Value {
        let mut rows = |x: &Value| match *x.dims() {
            [samples, kv_heads, heads, queries, width] => {
                self.hlo.reshape(x, &[samples, kv_heads, heads * queries, width])
            }
            _ => x.clone(),
        };
        let (a, b) = (rows(a), rows(b));
        let product = Product { batch: [&[0, 1], &[0, 1]], contract: [&[contracted[0]], &[contracted[1]]] };
        self.hlo.dot(&a, &b, product, element)
    }
}
