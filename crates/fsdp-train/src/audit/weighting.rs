//! How micro-batches count in the gradient: their weights are the solution of linear equations.
//!
//! The gradient of a step is a weighted sum of the gradients of its micro-batches. So products of these with each other and with
//! the used gradient say at once how well any weights explain it, without another computation.

mod products;
mod suspects;

pub(super) use self::products::Products;
use self::suspects::suspects;
use super::report::{Cause, number};
use super::sums::clip;

/// A gradient in which micro-batches count otherwise.
#[derive(Clone, Debug)]
pub(super) struct Weighting {
    pub(super) cause: Cause,
    pub(super) text: String,
    /// How often a micro-batch counts, if it is one that counts otherwise.
    pub(super) factor: Option<f64>,
    /// How often each micro-batch counts, up to a common factor.
    pub(super) counts: Vec<f64>,
}

impl Weighting {
    /// Whether a common factor is another fault, and not a part of this one.
    pub(super) fn leaves_length(&self) -> bool {
        matches!(self.cause, Cause::LossMeanOfMeans | Cause::GradientMissing) || self.factor.is_some()
    }
}

/// What the search for weights knows of the micro-batches.
pub(super) struct MicroBatches<'a> {
    /// Tokens that count in each.
    pub(super) tokens: &'a [usize],
    /// Products of their gradients, of each element relative to its bound.
    pub(super) relative: &'a Products,
    /// The same of each parameter, if precision is enough for a factor of its own.
    pub(super) each: &'a [Products],
    /// Products of their gradients as they are.
    pub(super) plain: &'a Products,
    pub(super) grad_clip: Option<f64>,
    /// The largest squared distance, relative to bounds, that precision allows.
    pub(super) bound2: f64,
}

/// A known fault that explains so much is worth a computation, even if it does not explain everything.
const PROMISING: f64 = 0.9;

/// Part of the largest squared distance below which distances are rounding.
const EXACT: f64 = 1e-2;

/// Weights are listed for so many micro-batches.
const LISTED_MAX: usize = 8;

impl MicroBatches<'_> {
    fn len(&self) -> usize {
        self.tokens.len()
    }

    /// The simplest weights that explain the used gradient, or the known fault that comes near.
    pub(super) fn explained(&self) -> Option<Weighting> {
        let distance2 = |weighting: &Weighting| self.relative.distance2(&weighting.counts);
        // What is explained far within the bound is explained: of such, the first is the simplest.
        let rank = |weighting: &Weighting| distance2(weighting).max(EXACT * self.bound2);
        let order = |left: &Weighting, right: &Weighting| rank(left).total_cmp(&rank(right));
        let known = suspects(self).into_iter().min_by(order);
        if known.as_ref().is_some_and(|known| distance2(known) <= self.bound2) {
            return known;
        }
        let found = self.relative.nearest();
        let simple = [self.missing(&found), self.one(), self.any(&found)];
        if let Some(weighting) = simple.into_iter().flatten().find(|found| distance2(found) <= self.bound2) {
            return Some(weighting);
        }
        // Beside factors of parameters.
        let apart2 = |weighting: &Weighting| -> f64 {
            self.each.iter().map(|param| param.distance2(&weighting.counts)).sum()
        };
        let apart = suspects(self).into_iter().find(|found| apart2(found) <= self.bound2);
        if apart.is_some() && !self.each.is_empty() {
            return apart;
        }
        let whole = self.relative.distance2(&vec![1.0; self.len()]);
        known.filter(|known| distance2(known) < (1.0 - PROMISING) * whole)
    }

    /// Several micro-batches did not arrive.
    fn missing(&self, found: &[f64]) -> Option<Weighting> {
        let largest = found.iter().copied().fold(0.0, f64::max);
        let counts: Vec<f64> = found.iter().map(|count| f64::from(*count > largest / 2.0)).collect();
        let missing: Vec<usize> = (0..self.len()).filter(|&index| counts[index] == 0.0).collect();
        let text =
            format!("micro-batches {} of {} did not arrive in the gradient", listed(&missing), self.len());
        let is_some = !missing.is_empty() && missing.len() < self.len();
        is_some.then_some(Weighting { cause: Cause::GradientMissing, text, factor: None, counts })
    }

    /// One micro-batch counts another number of times than the others.
    fn one(&self) -> Option<Weighting> {
        let of = |index: usize| {
            let [others, one] = self.relative.apart(index)?;
            let mut counts = vec![1.0; self.len()];
            counts[index] = one / others;
            Some((index, others, counts))
        };
        let distance2 = |counts: &[f64]| self.relative.distance2(counts);
        // Of two micro-batches, either explains it: the other one counts as it should.
        let rank = |(_, others, counts): &(usize, f64, Vec<f64>)| {
            (
                distance2(counts) > self.bound2,
                (others / self.relative.scale(&vec![1.0; self.len()])).ln().abs(),
            )
        };
        let found = (0..self.len()).filter_map(of).filter(|(_, others, _)| *others > 0.0);
        let order = |left: &(usize, f64, Vec<f64>), right: &(usize, f64, Vec<f64>)| {
            let (left, right) = (rank(left), rank(right));
            left.0.cmp(&right.0).then(left.1.total_cmp(&right.1))
        };
        let (index, _, counts) = found.min_by(order)?;
        let factor = counts[index];
        let text = format!(
            "micro-batch {index} of {} counts {} times in the gradient, relative to the others",
            self.len(),
            number(factor)
        );
        Some(Weighting { cause: Cause::GradientScaled, text, factor: Some(factor), counts })
    }

    /// Each micro-batch counts another number of times.
    fn any(&self, found: &[f64]) -> Option<Weighting> {
        let expected = clip(self.grad_clip, self.plain.norm(&vec![1.0; self.len()]));
        let shown: Vec<String> =
            found.iter().take(LISTED_MAX).map(|count| number(count / expected)).collect();
        let others = match found.len().saturating_sub(LISTED_MAX) {
            0 => String::new(),
            others => format!(" and {others} more"),
        };
        let text = format!(
            "micro-batches count {}{others} times in the gradient, each by its own",
            shown.join(", ")
        );
        Some(Weighting { cause: Cause::GradientScaled, text, factor: None, counts: found.to_vec() })
    }
}

/// Numbers, as `0, 1 and 3`.
fn listed(numbers: &[usize]) -> String {
    let shown: Vec<String> = numbers.iter().take(LISTED_MAX).map(ToString::to_string).collect();
    match (&shown[..], numbers.len().saturating_sub(LISTED_MAX)) {
        ([], _) => String::new(),
        ([one], 0) => one.clone(),
        ([first @ .., last], 0) => format!("{} and {last}", first.join(", ")),
        (shown, others) => format!("{} and {others} more", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests;
