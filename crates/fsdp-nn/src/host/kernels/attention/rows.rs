//! Vectorized operations on one row of scores.

use std::ops::Range;

use crate::host::element::{Element, Float};
use crate::host::math;
use crate::host::raw::vectorized;

/// Returns the scores of the visible keys; sets the others to zero.
pub(super) fn show<A: Float>(visible: Range<usize>, scores: &mut [A]) -> &mut [A] {
    scores[..visible.start].fill(A::ZERO);
    scores[visible.end..].fill(A::ZERO);
    &mut scores[visible]
}

vectorized! {
    /// Replaces a row of scores by their exponentials relative to the largest. Returns the log-sum-exp, and the
    /// factor that turns the exponentials into probabilities.
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

/// Returns the dot product of an output row and its gradient; it equals that of the probabilities and their
/// gradients.
pub(super) fn project<E: Element>(doutput: &[E::Acc], y: &[E]) -> E::Acc {
    math::sum2(doutput, y, |doutput, y| doutput * y.load())
}

/// The scalars of one row of scores.
#[derive(Clone, Copy)]
pub(super) struct Row<A> {
    pub(super) scale: A,
    pub(super) log_sum: A,
    pub(super) projection: A,
}

vectorized! {
    /// Replaces scores by (dropped) probabilities, and gradients of probabilities by gradients of scores.
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
