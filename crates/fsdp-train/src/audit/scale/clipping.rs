//! Clipping: by another norm, to another one, apart, or not at all.

use super::number::{DIGITS_ERROR, is_round, is_whole, near};
use super::{Cluster, Compared};
use crate::audit::report::{Cause, Finding, number, shown};
use crate::audit::sums::{clip, total};

impl Compared<'_> {
    /// All parameters have one factor, and not that of clipping.
    pub(super) fn of_all(&self, all: &Cluster) -> Finding {
        let (factor, norm, expected) = (all.factor(), all.norm(), self.clip());
        let scaled = |factor: f64| Finding {
            cause: Cause::GradientScaled,
            params: self.names(&all.params),
            factor: Some(factor),
            explains: 0.0,
            text: format!("the gradient of all parameters was multiplied by {}", number(factor)),
        };
        let clipped = |text: String| Finding {
            text,
            cause: Cause::Clipping,
            params: Vec::new(),
            factor: Some(factor / expected),
            ..scaled(1.0)
        };
        let (used, is_short) = (factor * norm, factor < 1.0 && is_round(factor * norm, all.error));
        let Some(max) = self.grad_clip else {
            return match is_short && !is_whole(factor, all.error) {
                true => clipped(format!(
                    "gradients were clipped to the norm {}, but the run file has no train.grad_clip",
                    number(used)
                )),
                false => scaled(factor),
            };
        };
        let is_clipped = expected < 1.0;
        if let Some((norm, what)) = self.other_norm(all, max) {
            let norm = number(norm);
            return clipped(format!("gradients were clipped by {what} ({norm}), not by their norm"));
        }
        if is_clipped && near(factor, 1.0, all.error) {
            let norm = number(norm);
            return clipped(format!(
                "gradients were not clipped: their norm is {norm}, train.grad_clip is {max}"
            ));
        }
        let is_multiple = is_whole(factor / expected, all.error);
        if is_short && (is_clipped || !is_whole(factor, all.error)) {
            let or = match is_multiple {
                true => format!(" (or multiplied by {} after clipping)", number(factor / expected)),
                false => String::new(),
            };
            let used = number(used);
            return clipped(format!(
                "gradients were clipped to the norm {used}, train.grad_clip is {max}{or}"
            ));
        }
        // Scaled after clipping, or before it to a norm that needs no clipping.
        if is_multiple {
            return scaled(factor / expected);
        }
        if !is_clipped || is_whole(factor, all.error) && used <= max {
            return scaled(factor);
        }
        clipped(format!(
            "gradients were clipped by another norm: by {} instead of {}, as if their norm were {} instead of {}",
            number(factor),
            number(expected),
            number(max / factor),
            number(norm)
        ))
    }

    /// A norm of another kind by which all were clipped, and what it is.
    fn other_norm(&self, all: &Cluster, max: f64) -> Option<(f64, &'static str)> {
        let total = total(self.sums);
        let is_by = |(norm, _): &(f64, &str)| {
            let coefficient = clip(Some(max), *norm);
            coefficient < 1.0 && (all.factor() / coefficient - 1.0).abs() <= DIGITS_ERROR
        };
        let norms = [(total.abs, "the sum of all elements"), (total.peak, "the largest element")];
        norms.into_iter().find(is_by)
    }

    /// Groups of parameters, or each parameter, clipped by their own norm: to the limit of the run file, or to another.
    pub(super) fn clipped_apart(&self, clusters: &[Cluster]) -> Option<Finding> {
        let order = |left: &&Cluster, right: &&Cluster| left.factor().total_cmp(&right.factor());
        let smallest = clusters.iter().min_by(order)?;
        let used = smallest.factor() * smallest.norm();
        // What is left of a missing gradient is rounding: its norm is no limit.
        let found = (!smallest.is_missing() && is_round(used, smallest.error)).then_some(used);
        self.grad_clip.into_iter().chain(found).find_map(|max| self.clipped_apart_to(clusters, max))
    }

    fn clipped_apart_to(&self, clusters: &[Cluster], max: f64) -> Option<Finding> {
        let is_stated = self.grad_clip == Some(max);
        let finding = |what: &str| {
            let text =
                format!("gradients were clipped to {} {what}, not by the norm of all together", number(max));
            Finding::of_all(Cause::Clipping, 0.0, text)
        };
        // One group alone says nothing about a limit that nobody stated.
        let least = if is_stated { 1 } else { 2 };
        let own = |index: usize| clip(Some(max), self.sums[index].ee.sqrt());
        let is_own = |index: usize| {
            let error = self.bounds[index] / self.sums[index].ee.sqrt();
            near(self.sums[index].factor().unwrap_or(0.0), own(index), error)
        };
        if self.significant().all(is_own)
            && self.significant().filter(|&index| own(index) < 1.0).count() >= least
        {
            return Some(finding("each parameter by its own norm"));
        }
        let is_own =
            |cluster: &&Cluster| near(cluster.factor(), clip(Some(max), cluster.norm()), cluster.error);
        let is_left = |cluster: &Cluster| near(cluster.factor(), 1.0, cluster.error);
        let clipped: Vec<&Cluster> = clusters.iter().filter(|cluster| !is_left(cluster)).collect();
        if clipped.len() < least || !clipped.iter().all(is_own) {
            return None;
        }
        let first = |cluster: &&Cluster| self.names(&cluster.params).swap_remove(0);
        let mut names: Vec<String> = clipped.iter().map(first).collect();
        names.sort();
        let which = format!("in {} groups, each by its own norm (that of {})", clipped.len(), shown(&names));
        Some(finding(&which))
    }
}
