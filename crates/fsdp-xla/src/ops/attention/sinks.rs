//! Sinks: scores that take a share of the probability of a row, and have no value.

use fsdp_nn::op::AttentionDims;

use crate::hlo::Value;
use crate::ops::Call;
use crate::trace::Trace;

impl Trace {
    /// Scales the output of attention by what the sinks leave, and adds them to the log-sum-exps.
    pub(super) fn sink(&mut self, dims: AttentionDims, operands: Call<'_, '_>) {
        let ([sinks], [y, lse], _) = operands.split();
        let sinks = self.read_master(sinks);
        let sinks = self.by_head_and_position(dims, &sinks);
        let old = self.read(lse.slice.as_slice());
        let old = self.hlo.reshape(&old, sinks.dims());
        let difference = self.hlo.subtract(&old, &sinks);
        let share = self.hlo.unary("logistic", &difference);
        // The larger, and the logarithm of one plus the exponential of minus the distance.
        let distance = self.hlo.unary("abs", &difference);
        let negative = self.hlo.unary("negate", &distance);
        let exponential = self.hlo.unary("exponential", &negative);
        let rest = self.hlo.unary("log_plus_one", &exponential);
        let larger = self.hlo.binary("maximum", &old, &sinks);
        let log_sums = self.hlo.add(&larger, &rest);
        let AttentionDims { batch, seq, heads, head_dim, .. } = dims;
        let outputs = [batch, seq, heads, head_dim];
        let out = self.read_master(y.slice.as_slice());
        let out = self.hlo.reshape(&out, &outputs);
        let share = self.hlo.broadcast(&share, &[0, 2, 1], &outputs);
        let scaled = self.hlo.multiply(&out, &share);
        self.write(&y, &scaled);
        self.write(&lse, &log_sums);
    }

    /// Computes the gradients of the scores of sinks: minus their probability, times the product of output and gradient.
    pub(super) fn sink_backward(&mut self, dims: AttentionDims, operands: Call<'_, '_>) {
        let ([sinks, y, lse, dy], [dsinks], _) = operands.split();
        let sinks = self.read_master(sinks);
        let sinks = self.by_head_and_position(dims, &sinks);
        let lse = self.read(lse);
        let lse = self.hlo.reshape(&lse, sinks.dims());
        let difference = self.hlo.subtract(&sinks, &lse);
        let probability = self.hlo.unary("exponential", &difference);
        let AttentionDims { batch, seq, heads, head_dim, .. } = dims;
        let (y, dy) = (self.read_master(y), self.read_master(dy));
        let products = self.hlo.multiply(&y, &dy);
        let products = self.hlo.reshape(&products, &[batch, seq, heads, head_dim]);
        let projection = self.hlo.sum(&products, &[3]);
        let probability = self.hlo.transpose(&probability, &[0, 2, 1]);
        let gradient = self.hlo.multiply(&probability, &projection);
        let gradient = self.hlo.unary("negate", &gradient);
        self.write(&dsinks, &gradient);
    }

    /// The scores of sinks as samples x heads x positions.
    fn by_head_and_position(&mut self, dims: AttentionDims, sinks: &Value) -> Value {
        let sinks = self.hlo.reshape(sinks, &[dims.batch, dims.seq, dims.heads]);
        self.hlo.transpose(&sinks, &[0, 2, 1])
    }
}
