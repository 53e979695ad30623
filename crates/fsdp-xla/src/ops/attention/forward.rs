//! The forward pass of attention.

use fsdp_nn::op::{AttentionDims, Scores};

use super::Heads;
use super::block::{Block, Division};
use super::scores::Rules;
use crate::hlo::Value;
use crate::ops::Call;
use crate::trace::Trace;

impl Trace {
    pub(super) fn attend(&mut self, dims: AttentionDims, scores: Scores, operands: Call<'_, '_>) {
        let rules = Rules { dims, scores, batch: operands.batch };
        let ([qkv], [y, lse], _) = operands.split();
        let qkv = self.read(qkv);
        let heads = self.heads(dims, &qkv);
        let (element, master) = (heads.queries.element(), heads.queries.element().master());
        let division = Division::new(dims, scores, master, self.scores_max_bytes);
        let [out, logarithms] = if division.blocks() == 1 {
            self.attend_block(&rules, &heads, &Block::whole(dims))
        } else {
            let AttentionDims { batch, seq, heads: count, kv_heads, .. } = dims;
            let out = self.hlo.zeros(heads.queries.dims(), element);
            let logarithms = self.hlo.zeros(&[batch, kv_heads, count / kv_heads, seq], master);
            self.repeat(division.blocks(), [out, logarithms], |trace, number, [out, logarithms]| {
                let block = division.block(trace, dims, number);
                let block_heads = block.heads_of(trace, &heads);
                let [block_out, block_logarithms] = trace.attend_block(&rules, &block_heads, &block);
                [
                    block.put_queries(trace, &out, &block_out),
                    block.put_queries(trace, &logarithms, &block_logarithms),
                ]
            })
        };
        self.write(&lse, &logarithms);
        let out = self.by_row(&out);
        self.write(&y, &out);
    }

    /// The outputs of a block, in the layout of its queries, and the log-sum-exp of each query.
    fn attend_block(&mut self, rules: &Rules<'_>, heads: &Heads, block: &Block) -> [Value; 2] {
        let (x, _) = rules.scores(self, heads, block);
        let largest = self.hlo.largest(&x, &[4]);
        let wide = self.over_keys(&largest, &x);
        let exponents = self.hlo.subtract(&x, &wide);
        let exponentials = self.hlo.unary("exponential", &exponents);
        let sums = self.hlo.sum(&exponentials, &[4]);
        let logarithms = self.hlo.unary("log", &sums);
        let logarithms = self.hlo.add(&logarithms, &largest);
        let sums = self.over_keys(&sums, &x);
        let mut weights = self.hlo.divide(&exponentials, &sums);
        if let Some(kept) = rules.kept(self, block, &weights) {
            weights = self.hlo.multiply(&weights, &kept);
        }
        let element = rules.weights_element(&heads.values);
        let (weights, values) =
            (self.hlo.convert(&weights, element), self.hlo.convert(&heads.values, element));
        let out = self.product(&weights, &values, [3, 2], element.master());
        let out = self.hlo.convert(&out, heads.values.element());
        [self.hlo.reshape(&out, heads.queries.dims()), logarithms]
    }
}
