//! What is done to one row of scores, with the vectors of the processor.

use std::ops::Range;

use crate::host::element::{Element, Float};
use crate::host::math;
use crate::host::raw::vectorized;

/// The scores of keys that a query sees; the others become zero.
pub(super) fn show<A: Float>(visible: Range<usize>, scores: &mut [A]) -> &mut [A] {
    scores[..visible.start].fill(A::ZERO);
    scores[visible.end..].fill(A::ZERO);
    &mut scores[visible]
}

vectorized! {
    /// Exponentials of a row of scores relative to its largest. Returns the log-sum-exp and what the exponentials have to
    /// be multiplied with to be probabilities.
    pub(super) fn softmax_row<A: Float>(scale: A, scores: &mut [A]) -> (A, A) {
        let shift = math::max(scores) * scale;
        let sum = math::exp_sum(scores, scale, shift);
        (A::of(shift.as_f64() + sum.as_f64().ln()), A::ONE / sum)
    }
}

vectorized! {
    pub(super) fn cap_row<A: Float>(scale: A, cap: A, scores: &mut [A], slopes: &mut [A]) {
        for (score, slope) in scores.iter_mut().zip(slopes) {
            let bent = math::tanh(*score * scale / cap);
            *score = cap * bent;
            *slope = (A::ONE - bent * bent) * scale;
        }
    }
}

vectorized! {
    pub(super) fn multiply<A: Float>(factors: &[A], values: &mut [A]) {
        for (value, &factor) in values.iter_mut().zip(factors) {
            *value *= factor;
        }
    }
}

vectorized! {
    pub(super) fn store_scaled<A: Float, E: Element<Acc = A>>(scale: A, from: &[A], to: &mut [E]) {
        for (to, &from) in to.iter_mut().zip(from) {
            *to = E::store(from * scale);
        }
    }
}

/// The sum of products of an output row and its gradient, which is that of probabilities and theirs.
pub(super) fn project<E: Element>(doutput: &[E::Acc], y: &[E]) -> E::Acc {
    math::sum2(doutput, y, |doutput, y| doutput * y.load())
}

/// Numbers of one row of scores.
#[derive(Clone, Copy)]
pub(super) struct Row<A> {
    pub(super) scale: A,
    pub(super) log_sum: A,
    pub(super) projection: A,
}

vectorized! {
    /// Turns scores into (dropped) probabilities and gradients of probabilities into gradients of scores.
    pub(super) fn gradient_row<A: Float>(row: Row<A>, factors: Option<&[A]>, scores: &mut [A], dscores: &mut [A]) {
        for score in scores.iter_mut() {
            *score = (*score * row.scale - row.log_sum).exp();
        }
        let Some(factors) = factors else {
            for (score, dscore) in scores.iter().zip(dscores) {
                *dscore = *score * (*dscore - row.projection) * row.scale;
            }
            return;
        };
        for ((score, dscore), &factor) in scores.iter_mut().zip(dscores).zip(factors) {
            *dscore = *score * (*dscore * factor - row.projection) * row.scale;
            *score *= factor;
        }
    }
}
