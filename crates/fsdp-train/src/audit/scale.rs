//! Faults that multiply gradients: all of them, those of some parameters, or the rows of a rank.

mod clipping;
mod number;
mod ranks;

use std::collections::BTreeSet;

use fsdp_core::model::ModelSpec;

use self::number::near;
use super::measure::stacked;
use super::report::{Cause, EXPLAINED_MIN, Finding, number, shown};
use super::sums::{Sums, clip, total};

/// Parameters with the same factor.
#[derive(Clone, Debug)]
struct Cluster {
    params: Vec<usize>,
    sums: Sums,
    /// Error of the factor that precision alone may make.
    error: f64,
}

impl Cluster {
    fn factor(&self) -> f64 {
        self.sums.factor().unwrap_or(0.0)
    }

    /// Of this factor, without parameters.
    fn of(factor: f64) -> Self {
        let sums = Sums { clip: factor, ee: f64::MIN_POSITIVE, ..Sums::default() };
        Self { params: Vec::new(), sums, error: 0.0 }
    }

    /// Whether its gradient is missing, as far as precision shows.
    fn is_missing(&self) -> bool {
        self.factor().abs() <= self.error
    }

    /// The norm of the expected gradient.
    fn norm(&self) -> f64 {
        self.sums.ee.sqrt()
    }
}

/// Comparisons of the parameters, with the differences that precision alone may make.
#[derive(Clone, Copy)]
pub(super) struct Compared<'a> {
    pub(super) spec: &'a ModelSpec,
    pub(super) sums: &'a [Sums],
    pub(super) bounds: &'a [f64],
    pub(super) grad_clip: Option<f64>,
}

impl Compared<'_> {
    /// The coefficient of clipping that the expected gradient calls for.
    pub(super) fn clip(&self) -> f64 {
        clip(self.grad_clip, total(self.sums).ee.sqrt())
    }

    /// The squared distance between the used gradient and `factor` times the expected one, of all parameters.
    pub(super) fn distance2(&self, factor: f64) -> f64 {
        self.sums.iter().map(|sums| sums.distance2(factor)).sum()
    }

    /// The parameters that differ from `factor` times the expected gradient by more than precision allows.
    pub(super) fn outside(&self, factor: f64) -> Vec<usize> {
        let is_outside = |(sums, bound): (&Sums, &f64)| sums.distance2(factor).sqrt() > *bound;
        let pairs = self.sums.iter().zip(self.bounds).enumerate();
        pairs.filter(|(_, pair)| is_outside(*pair)).map(|(index, _)| index).collect()
    }

    /// Parameters whose gradient is large enough to have a factor.
    fn significant(&self) -> impl Iterator<Item = usize> {
        (0..self.sums.len()).filter(|&index| self.is_significant(index))
    }

    fn is_significant(&self, index: usize) -> bool {
        self.sums[index].ee > 0.0 && self.sums[index].ee.sqrt() > 4.0 * self.bounds[index]
    }

    /// Explains the used gradient by a factor for each parameter; `None` if factors do not explain it.
    pub(super) fn explained(&self) -> Option<Vec<Finding>> {
        let is_explained = |index: usize| {
            let sums = self.sums[index];
            sums.leftover() <= self.bound(index, sums.factor().unwrap_or(0.0))
        };
        if !(0..self.sums.len()).all(is_explained) {
            return None;
        }
        let mut clusters = self.clusters();
        self.add_small(&mut clusters);
        let explains = self.explained_share(&clusters);
        // Where precision is low, factors that explain little fit many parameters.
        if explains < EXPLAINED_MIN {
            return None;
        }
        let finding = match &clusters[..] {
            [] => return None,
            [all] if all.is_missing() => {
                let text = "no parameter got a gradient".to_owned();
                let params = self.names(&all.params);
                Finding { cause: Cause::GradientMissing, params, factor: Some(0.0), explains, text }
            }
            [all] => self.of_all(all),
            _ => return Some(self.of_some(&clusters, explains)),
        };
        Some(vec![Finding { explains, ..finding }])
    }

    /// What precision allows for a gradient with a factor: errors grow with it.
    fn bound(&self, index: usize, factor: f64) -> f64 {
        self.bounds[index] * (factor.abs() / self.clip()).max(1.0)
    }

    /// The share of the squared difference that the clusters explain; parameters that are in none of them keep theirs.
    fn explained_share(&self, clusters: &[Cluster]) -> f64 {
        let mut factors = vec![self.clip(); self.sums.len()];
        for cluster in clusters {
            cluster.params.iter().for_each(|&index| factors[index] = cluster.factor());
        }
        let left: f64 = self.sums.iter().zip(factors).map(|(sums, factor)| sums.distance2(factor)).sum();
        1.0 - left / self.distance2(self.clip())
    }

    /// Adds parameters whose gradient is too small for a factor of their own to the cluster whose factor explains them, if
    /// that explains them much better than any other; or to those that are right, or missing.
    fn add_small(&self, clusters: &mut Vec<Cluster>) {
        let found = clusters.len();
        for factor in [self.clip(), 0.0] {
            if !clusters.iter().any(|cluster| near(cluster.factor(), factor, cluster.error)) {
                clusters.push(Cluster::of(factor));
            }
        }
        let factors: Vec<f64> = clusters.iter().map(Cluster::factor).collect();
        for index in
            (0..self.sums.len()).filter(|&index| self.sums[index].ee > 0.0 && !self.is_significant(index))
        {
            let distance = |cluster: &usize| self.sums[index].distance2(factors[*cluster]);
            let order = |left: &usize, right: &usize| distance(left).total_cmp(&distance(right));
            let Some(nearest) = (0..factors.len()).min_by(order) else { continue };
            if (0..factors.len()).all(|other| other == nearest || 4.0 * distance(&nearest) < distance(&other))
            {
                clusters[nearest].params.push(index);
                if nearest >= found {
                    clusters[nearest].sums.ee += self.sums[index].ee;
                }
            }
        }
        clusters.retain(|cluster| !cluster.params.is_empty());
    }

    fn clusters(&self) -> Vec<Cluster> {
        let mut sorted: Vec<usize> = self.significant().collect();
        let factor = |index: usize| self.sums[index].factor().unwrap_or(0.0);
        sorted.sort_by(|&left, &right| factor(left).total_cmp(&factor(right)));
        let mut clusters: Vec<Cluster> = Vec::new();
        for index in sorted {
            let sums = self.sums[index];
            let error = self.bound(index, factor(index)) / sums.ee.sqrt();
            match clusters.last_mut() {
                Some(last)
                    if factor(index) - last.factor() <= error + last.error + 1e-4 * factor(index).abs() =>
                {
                    last.params.push(index);
                    last.sums = last.sums + sums;
                    last.error = last.error.min(error);
                }
                _ => clusters.push(Cluster { params: vec![index], sums, error }),
            }
        }
        clusters
    }

    /// Parameters have several factors.
    fn of_some(&self, clusters: &[Cluster], explains: f64) -> Vec<Finding> {
        if let Some(finding) = self.clipped_apart(clusters) {
            return vec![Finding { explains, ..finding }];
        }
        let base = self.base(clusters);
        let others = clusters.iter().filter(|cluster| !std::ptr::eq(*cluster, base));
        let finding = |cluster: &Cluster| {
            let factor =
                if base.factor() == 0.0 { cluster.factor() } else { cluster.factor() / base.factor() };
            let is_missing = cluster.is_missing();
            let names = self.names(&cluster.params);
            let shown = shown(&names);
            Finding {
                cause: if is_missing { Cause::GradientMissing } else { Cause::GradientScaled },
                factor: Some(if is_missing { 0.0 } else { factor }),
                explains,
                text: match is_missing {
                    true => format!("{shown} got no gradient"),
                    false => format!("the gradient of {shown} was multiplied by {}", number(factor)),
                },
                params: names,
            }
        };
        others.map(finding).collect()
    }

    /// The parameters whose gradient is right: the largest cluster whose factor is that of clipping with what was used.
    fn base<'c>(&self, clusters: &'c [Cluster]) -> &'c Cluster {
        let is_consistent = |base: &&Cluster| {
            let factor = base.factor();
            let norm2: f64 =
                clusters.iter().map(|other| (other.factor() / factor).powi(2) * other.sums.ee).sum();
            !base.is_missing() && factor > 0.0 && near(factor, clip(self.grad_clip, norm2.sqrt()), base.error)
        };
        // Experts of a layer are one tensor to most programs.
        let tensor = |index: &usize| {
            let name = &self.spec.params[*index].fqn;
            stacked(name).map_or_else(|| name.clone(), |(stack, _)| stack)
        };
        let size = |cluster: &&Cluster| cluster.params.iter().map(tensor).collect::<BTreeSet<_>>().len();
        let consistent = clusters.iter().filter(is_consistent).max_by_key(size);
        let used = || clusters.iter().filter(|cluster| !cluster.is_missing()).max_by_key(size);
        consistent.or_else(used).unwrap_or(&clusters[0])
    }

    pub(super) fn names(&self, params: &[usize]) -> Vec<String> {
        let mut params = params.to_vec();
        params.sort_unstable();
        params.iter().map(|&index| self.spec.params[index].fqn.clone()).collect()
    }
}

#[cfg(test)]
mod tests;
