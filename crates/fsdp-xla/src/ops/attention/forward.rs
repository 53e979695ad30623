//! Attention's output.

use fsdp_nn::op::{AttentionDims, Scores};

use super::Heads;
use super::block::{Block, Division};
use super::scores::Rules;
use crate::hlo::{Product, Value};
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
            self.attend_block(&rules, &heads, &Division::whole(dims))
        } else {
            let AttentionDims { batch, seq, heads: count, kv_heads, .. } = dims;
            let out = self.hlo.zeros(heads.queries.dims(), element);
            let logarithms = self.hlo.zeros(&[batch, kv_heads, count / kv_heads, seq], master);
            self.repeat(division.blocks(), [out, logarithms], |trace, number, [out, logarithms]| {
                let block = division.block(trace, dims, number);
                let own = Heads {
                    queries: block.queries_of(trace, &heads.queries, 1),
                    keys: block.samples_of(trace, &heads.keys),
                    values: block.samples_of(trace, &heads.values),
                };
                let [own_out, own_logarithms] = trace.attend_block(&rules, &own, &block);
                [
                    block.put_queries(trace, &out, &own_out, 1),
                    block.put_queries(trace, &logarithms, &own_logarithms, 3),
                ]
            })
        };
        self.write(&lse, &logarithms);
        self.write(&y, &out);
    }

    /// Outputs of a block (sample, query, key/value head, query head, element), and logarithms of the sums of its
    /// exponentials (sample, key/value head, query head, query).
    fn attend_block(&mut self, rules: &Rules<'_>, heads: &Heads, block: &Block) -> [Value; 2] {
        let (x, _) = rules.scores(self, heads, block);
        let largest = self.hlo.reduce("maximum", &x, &[4]);
        let wide = self.over_keys(&largest, &x);
        let exponents = self.hlo.subtract(&x, &wide);
        let exponentials = self.hlo.unary("exponential", &exponents);
        let sums = self.hlo.reduce("add", &exponentials, &[4]);
        let logarithms = self.hlo.unary("log", &sums);
        let logarithms = self.hlo.add(&logarithms, &largest);
        let logarithms = self.hlo.transpose(&logarithms, &[0, 1, 3, 2]);
        let sums = self.over_keys(&sums, &x);
        let mut weights = self.hlo.divide(&exponentials, &sums);
        if let Some(kept) = rules.kept(self, block, &weights) {
            weights = self.hlo.multiply(&weights, &kept);
        }
        let element = rules.weighting(&heads.values);
        let (weights, values) =
            (self.hlo.convert(&weights, element), self.hlo.convert(&heads.values, element));
        let product = Product { batch: [&[0, 1], &[0, 2]], contract: [&[4], &[1]] };
        let out = self.hlo.dot(&weights, &values, product, element.master());
        let out = self.hlo.convert(&out, heads.values.element());
        [self.hlo.transpose(&out, &[0, 2, 1, 3, 4]), logarithms]
    }
}
