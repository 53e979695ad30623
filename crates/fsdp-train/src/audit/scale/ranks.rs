//! Faults of the rows that a rank of FSDP holds.

use super::Compared;
use super::number::{FACTOR_ERROR, near};
use crate::audit::measure::Split;
use crate::audit::report::{Cause, EXPLAINED_MIN, Finding, number};
use crate::audit::sums::{Sums, clip};

impl Compared<'_> {
    /// Explains the used gradient by a factor for the rows of each rank, given their sums by rank.
    pub(in crate::audit) fn of_ranks(&self, by_param: &[Vec<Sums>], split: Split) -> Option<Finding> {
        let ranks = split.ranks;
        let is_explained =
            |(shards, bound): (&Vec<Sums>, &f64)| shards.iter().all(|sums| sums.leftover() <= *bound);
        if !by_param.iter().zip(self.bounds).all(is_explained) {
            return None;
        }
        let of_rank = |rank: usize| {
            by_param.iter().filter_map(|shards| shards.get(rank)).fold(Sums::default(), |all, one| all + *one)
        };
        let all: Vec<Sums> = (0..ranks).map(of_rank).collect();
        let factors: Vec<f64> = all.iter().map(|sums| sums.factor().unwrap_or(1.0)).collect();
        // One factor per rank has to explain all of its rows.
        let is_common = |(shards, bound): (&Vec<Sums>, &f64)| {
            shards.iter().zip(&factors).all(|(sums, factor)| sums.distance2(*factor).sqrt() <= *bound)
        };
        if !by_param.iter().zip(self.bounds).all(is_common) {
            return None;
        }
        let left: f64 = by_param
            .iter()
            .flat_map(|shards| shards.iter().zip(&factors))
            .map(|(sums, f)| sums.distance2(*f))
            .sum();
        let explains = 1.0 - left / self.distance2(self.clip());
        // Where precision is low, many rows have any factor.
        if explains < EXPLAINED_MIN {
            return None;
        }
        let is_own =
            |(sums, factor): (&Sums, &f64)| near(*factor, clip(self.grad_clip, sums.ee.sqrt()), FACTOR_ERROR);
        if self.grad_clip.is_some() && all.iter().zip(&factors).all(is_own) {
            let text = format!(
                "each of {ranks} ranks clipped its rows by their own norm, not by the norm of all together"
            );
            return Some(Finding::of_all(Cause::Clipping, explains, text));
        }
        let base = factors
            .iter()
            .copied()
            .min_by(|left, right| (left - self.clip()).abs().total_cmp(&(right - self.clip()).abs()))?;
        let (rank, factor) = factors
            .iter()
            .enumerate()
            .max_by(|left, right| (left.1 - base).abs().total_cmp(&(right.1 - base).abs()))?;
        let (cause, what) = match factor / base {
            factor if factor.abs() < FACTOR_ERROR => (Cause::GradientMissing, "was missing".to_owned()),
            factor => (Cause::GradientScaled, format!("was multiplied by {}", number(factor))),
        };
        let text = format!("the gradient of the rows of rank {rank} of {ranks} {what}");
        Some(Finding { cause, params: Vec::new(), factor: Some(factor / base), explains, text })
    }
}
