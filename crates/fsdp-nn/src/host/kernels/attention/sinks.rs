//! Sinks: scores that take a share of the probability of a row, and have no value.

use super::rows::{project, store_scaled};
use crate::host::element::{Element, Float};
use crate::host::floats::cast;
use crate::host::workers::Workers;
use crate::op::AttentionDims;

/// Scales the output of attention by what the sinks leave, and adds them to the log-sum-exps.
pub(super) fn forward<E: Element>(
    workers: &Workers,
    dims: AttentionDims,
    sinks: &[E],
    y: &mut [E],
    lse: &mut [E::Acc],
) {
    let AttentionDims { seq, heads, head_dim, .. } = dims;
    let samples = y.chunks_mut(seq * heads * head_dim).zip(sinks.chunks(seq * heads));
    workers.each(samples.zip(lse.chunks_mut(heads * seq)), |((y, sinks), lse)| {
        let mut row = workers.scratch::<E::Acc>(head_dim);
        for (at, (y, sink)) in y.chunks_exact_mut(head_dim).zip(sinks).enumerate() {
            let log_sum = &mut lse[at % heads * seq + at / heads];
            // The share of the sink is that of the logistic function, and the rest is its complement.
            let difference = sink.load() - *log_sum;
            let share = (-difference).logistic();
            cast(y, &mut row);
            store_scaled(share, &row, y);
            let larger = if difference > E::Acc::ZERO { sink.load() } else { *log_sum };
            let smaller = if difference > E::Acc::ZERO { -difference } else { difference };
            *log_sum = larger + E::Acc::of((smaller.as_f64()).exp().ln_1p());
        }
    });
}

/// Computes the gradients of the scores of sinks: minus their probability, times the product of output and gradient.
pub(super) fn backward<E: Element>(
    workers: &Workers,
    dims: AttentionDims,
    [sinks, y, dy]: [&[E]; 3],
    lse: &[E::Acc],
    dsinks: &mut [E],
) {
    let AttentionDims { seq, heads, head_dim, .. } = dims;
    let rows = y.chunks(seq * heads * head_dim).zip(dy.chunks(seq * heads * head_dim));
    let samples = dsinks.chunks_mut(seq * heads).zip(sinks.chunks(seq * heads)).zip(rows);
    workers.each(samples.zip(lse.chunks(heads * seq)), |(((dsinks, sinks), (y, dy)), lse)| {
        let mut row = workers.scratch::<E::Acc>(head_dim);
        let rows = y.chunks_exact(head_dim).zip(dy.chunks_exact(head_dim));
        for (at, ((dsink, sink), (y, dy))) in dsinks.iter_mut().zip(sinks).zip(rows).enumerate() {
            let probability = (sink.load() - lse[at % heads * seq + at / heads]).exp();
            cast(dy, &mut row);
            *dsink = E::store(-(probability * project(&row, y)));
        }
    });
}
