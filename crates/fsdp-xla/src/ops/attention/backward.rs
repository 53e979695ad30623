//! The gradient of attention, with recomputed scores.

use fsdp_nn::op::{AttentionDims, Scores};

use super::Heads;
use super::block::{Block, Division};
use super::scores::Rules;
use crate::hlo::Value;
use crate::ops::Call;
use crate::trace::Trace;

/// Inputs of the gradient besides queries, keys and values: the output and its gradient, in the layout of queries, and
/// the log-sum-exp of each query.
struct Outputs {
    y: Value,
    dy: Value,
    lse: Value,
}

impl Trace {
    pub(super) fn attend_backward(&mut self, dims: AttentionDims, scores: Scores, operands: Call<'_, '_>) {
        let AttentionDims { batch, seq, heads: count, kv_heads, head_dim } = dims;
        let rules = Rules { dims, scores, batch: operands.batch };
        let ([qkv, y, lse, dy], [dqkv], _) = operands.split();
        let [qkv, y, dy] = [qkv, y, dy].map(|slice| self.read(slice));
        // Put the recomputation of scores after a gradient, which does not exist in forward: otherwise the compiler
        // keeps the scores of forward.
        let qkv = self.hlo.after(&qkv, &dy);
        let heads = self.heads(dims, &qkv);
        let lse = self.read_master(lse);
        let lse = self.hlo.reshape(&lse, &[batch, kv_heads, count / kv_heads, seq]);
        let [y, dy] = [y, dy].map(|value| self.by_head(dims, &value));
        let outputs = Outputs { y, dy, lse };
        let (element, master) = (heads.queries.element(), heads.queries.element().master());
        let division = Division::new(dims, scores, master, self.scores_max_bytes);
        let gradients = if division.blocks() == 1 {
            self.attend_backward_block(&rules, &heads, &outputs, &Block::whole(dims))
        } else {
            let start = [&heads.queries, &heads.keys, &heads.values];
            let start = start.map(|value| self.hlo.zeros(value.dims(), master));
            self.repeat(division.blocks(), start, |trace, number, [dqueries, dkeys, dvalues]| {
                let block = division.block(trace, dims, number);
                let block_heads = block.heads_of(trace, &heads);
                let outputs = Outputs {
                    y: block.queries_of(trace, &outputs.y),
                    dy: block.queries_of(trace, &outputs.dy),
                    lse: block.queries_of(trace, &outputs.lse),
                };
                let parts = trace.attend_backward_block(&rules, &block_heads, &outputs, &block);
                [
                    block.put_queries(trace, &dqueries, &parts[0]),
                    block.add_samples(trace, &dkeys, &parts[1]),
                    block.add_samples(trace, &dvalues, &parts[2]),
                ]
            })
        };
        let [dqueries, dkeys, dvalues] = gradients.map(|gradient| self.hlo.convert(&gradient, element));
        let dqueries = self.by_row(&dqueries);
        let dqueries = self.hlo.reshape(&dqueries, &[batch, seq, count, head_dim]);
        let [dkeys, dvalues] = [dkeys, dvalues].map(|x| self.hlo.transpose(&x, &[0, 2, 1, 3]));
        let all = self.hlo.concatenate(&[dqueries, dkeys, dvalues], 2);
        self.write(&dqkv, &all);
    }

    /// Gradients of a block's queries, and its contributions to those of its samples' keys and values, in the type of
    /// arithmetic.
    fn attend_backward_block(
        &mut self,
        rules: &Rules<'_>,
        heads: &Heads,
        outputs: &Outputs,
        block: &Block,
    ) -> [Value; 3] {
        let (element, master) = (heads.queries.element(), heads.queries.element().master());
        let (x, slope) = rules.scores(self, heads, block);
        let lse = self.over_keys(&outputs.lse, &x);
        let exponents = self.hlo.subtract(&x, &lse);
        let weights = self.hlo.unary("exponential", &exponents);
        let row_dots = self.row_dots(outputs);
        let slopes = self.product(&outputs.dy, &heads.values, [3, 3], master);
        let mut slopes = self.hlo.reshape(&slopes, x.dims());
        let mut used_weights = weights.clone();
        if let Some(kept) = rules.kept(self, block, &weights) {
            slopes = self.hlo.multiply(&slopes, &kept);
            used_weights = self.hlo.multiply(&used_weights, &kept);
        }
        let row_dots = self.over_keys(&row_dots, &slopes);
        let slopes = self.hlo.subtract(&slopes, &row_dots);
        let mut slopes = self.hlo.multiply(&slopes, &weights);
        if let Some(slope) = slope {
            slopes = self.hlo.multiply(&slopes, &slope);
        }
        let slopes = self.hlo.with("multiply", &slopes, rules.scores.scale(rules.dims.head_dim));
        let slopes = self.hlo.convert(&slopes, element);
        let weights_element = rules.weights_element(&heads.values);
        let (used_weights, dy) = (
            self.hlo.convert(&used_weights, weights_element),
            self.hlo.convert(&outputs.dy, weights_element),
        );
        let dqueries = self.product(&slopes, &heads.keys, [3, 2], master);
        let dqueries = self.hlo.reshape(&dqueries, heads.queries.dims());
        let dkeys = self.product(&slopes, &heads.queries, [2, 2], master);
        let dvalues = self.product(&used_weights, &dy, [2, 2], master);
        [dqueries, dkeys, dvalues]
    }

    /// The term subtracted from each probability's gradient: the sum of all gradients, each times its probability.
    fn row_dots(&mut self, outputs: &Outputs) -> Value {
        let (y, dy) = (self.hlo.master(&outputs.y), self.hlo.master(&outputs.dy));
        let products = self.hlo.multiply(&y, &dy);
        self.hlo.sum(&products, &[4])
    }
}
