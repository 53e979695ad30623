//! Faults that multiply gradients: all of them, those of some parameters, or the rows of a rank.

use fsdp_core::model::ModelSpec;

use super::report::{Cause, Finding};
use super::sums::{Sums, clip, total};

/// Relative error up to which a factor counts as a whole number, or as that of clipping.
const FACTOR_ERROR: f64 = 2e-3;

/// A number with a larger error may be any whole number.
const WHOLE_ERROR_MAX: f64 = 0.1;

/// The largest factor that is recognized as a number of ranks or micro-batches.
const WHOLE_MAX: f64 = 4096.0;

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
        let finding = match &clusters[..] {
            [] => return None,
            [all] => self.of_all(all),
            _ => return Some(self.of_some(&clusters, explains)),
        };
        Some(vec![Finding { explains, ..finding }])
    }

    /// What precision allows for a gradient with a factor: errors grow with it.
    fn bound(&self, index: usize, factor: f64) -> f64 {
        self.bounds[index] * (factor.abs() / self.clip()).max(1.0)
    }

    fn explained_share(&self, clusters: &[Cluster]) -> f64 {
        let left: f64 = clusters
            .iter()
            .flat_map(|cluster| {
                cluster.params.iter().map(|&index| self.sums[index].distance2(cluster.factor()))
            })
            .sum();
        1.0 - left / self.distance2(self.clip())
    }

    /// Adds parameters whose gradient is too small for a factor of their own to the cluster whose factor explains them, if
    /// that explains them much better than any other.
    fn add_small(&self, clusters: &mut [Cluster]) {
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
            }
        }
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

    /// All parameters have one factor, and not that of clipping.
    fn of_all(&self, all: &Cluster) -> Finding {
        let (factor, norm, expected) = (all.factor(), all.sums.ee.sqrt(), self.clip());
        let scaled = |factor: f64| Finding {
            cause: Cause::GradientScaled,
            params: self.names(&all.params),
            factor: Some(factor),
            explains: 0.0,
            text: format!("the gradient of all parameters was multiplied by {}", number(factor)),
        };
        let Some(max) = self.grad_clip else {
            let used = factor * norm;
            if factor < 1.0 && is_round(used) && !is_whole(factor, all.error) {
                let text = format!(
                    "gradients were clipped to the norm {}, but the run file has no train.grad_clip",
                    number(used)
                );
                return Finding { cause: Cause::Clipping, params: Vec::new(), text, ..scaled(factor) };
            }
            return scaled(factor);
        };
        if expected < 1.0 && near(factor, 1.0, all.error) {
            return Finding {
                text: format!(
                    "gradients were not clipped: their norm is {}, train.grad_clip is {max}",
                    number(norm)
                ),
                cause: Cause::Clipping,
                params: Vec::new(),
                factor: Some(factor / expected),
                ..scaled(1.0)
            };
        }
        let used = factor * norm;
        if is_round(used) && used > max * (1.0 + FACTOR_ERROR)
            || is_round(used) && !is_whole(factor / expected, all.error)
        {
            return Finding {
                text: format!(
                    "gradients were clipped to the norm {}, train.grad_clip is {max}",
                    number(used)
                ),
                cause: Cause::Clipping,
                params: Vec::new(),
                factor: Some(factor / expected),
                ..scaled(1.0)
            };
        }
        // Scaled after clipping, or before it to a norm that needs no clipping.
        if is_whole(factor / expected, all.error) {
            return scaled(factor / expected);
        }
        if expected == 1.0 || is_whole(factor, all.error) && factor * norm <= max {
            return scaled(factor);
        }
        Finding {
            text: format!(
                "gradients were clipped by another norm: by {} instead of {}, as if their norm were {} instead of {}",
                number(factor),
                number(expected),
                number(max / factor),
                number(norm)
            ),
            cause: Cause::Clipping,
            params: Vec::new(),
            factor: Some(factor / expected),
            ..scaled(1.0)
        }
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
            let is_missing = factor.abs() <= cluster.error;
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
            factor > 0.0 && near(factor, clip(self.grad_clip, norm2.sqrt()), base.error)
        };
        let size = |cluster: &&Cluster| cluster.params.len();
        let consistent = clusters.iter().filter(is_consistent).max_by_key(size);
        consistent.or_else(|| clusters.iter().max_by_key(size)).expect("there are clusters")
    }

    /// Each parameter, or each group of them, clipped by its own norm.
    fn clipped_apart(&self, clusters: &[Cluster]) -> Option<Finding> {
        let max = self.grad_clip?;
        let finding = |what: &str| Finding {
            cause: Cause::Clipping,
            params: Vec::new(),
            factor: None,
            explains: 0.0,
            text: format!("gradients were clipped to {max} {what}, not by the norm of all together"),
        };
        let is_own = |index: usize| {
            let error = self.bounds[index] / self.sums[index].ee.sqrt();
            near(self.sums[index].factor().unwrap_or(0.0), clip(Some(max), self.sums[index].ee.sqrt()), error)
        };
        if self.significant().all(is_own) {
            return Some(finding("each parameter by its own norm"));
        }
        let is_group = |cluster: &Cluster| {
            near(cluster.factor(), clip(Some(max), cluster.sums.ee.sqrt()), cluster.error)
        };
        clusters.iter().all(is_group).then(|| finding("in groups, each by its own norm"))
    }

    /// Explains the used gradient by a factor for the rows of each rank, given their sums by rank.
    pub(super) fn of_ranks(&self, by_param: &[Vec<Sums>], ranks: usize) -> Option<Finding> {
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
        let is_own =
            |(sums, factor): (&Sums, &f64)| near(*factor, clip(self.grad_clip, sums.ee.sqrt()), FACTOR_ERROR);
        if self.grad_clip.is_some() && all.iter().zip(&factors).all(is_own) {
            let text = format!(
                "each of {ranks} ranks clipped its rows by their own norm, not by the norm of all together"
            );
            return Some(Finding {
                cause: Cause::Clipping,
                params: Vec::new(),
                factor: None,
                explains,
                text,
            });
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

    pub(super) fn names(&self, params: &[usize]) -> Vec<String> {
        let mut params = params.to_vec();
        params.sort_unstable();
        params.iter().map(|&index| self.spec.params[index].fqn.clone()).collect()
    }
}

/// Up to three names, and how many there are.
pub(super) fn shown(names: &[String]) -> String {
    let first = names.iter().take(3).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(3) {
        0 => first,
        others => format!("{first} and {others} more"),
    }
}

/// A number with four significant digits.
pub(super) fn number(value: f64) -> String {
    let rounded: f64 = format!("{value:.3e}").parse().unwrap_or(value);
    if (1e-3..1e6).contains(&rounded.abs()) || rounded == 0.0 {
        format!("{rounded}")
    } else {
        format!("{rounded:e}")
    }
}

fn near(value: f64, expected: f64, error: f64) -> bool {
    (value - expected).abs() <= (FACTOR_ERROR * expected.abs()).max(error)
}

/// Whether somebody would write this number as a norm to clip to: it has at most two digits.
fn is_round(value: f64) -> bool {
    let written: f64 = format!("{value:.1e}").parse().unwrap_or(value);
    (value - written).abs() <= 1e-4 * value
}

/// Whether a factor, or one divided by it, is a whole number.
fn is_whole(factor: f64, error: f64) -> bool {
    let whole = |value: f64| {
        let (rounded, error) = (value.round(), (error * value).max(FACTOR_ERROR));
        (1.0..=WHOLE_MAX).contains(&rounded) && error < WHOLE_ERROR_MAX && (value - rounded).abs() <= error
    };
    factor > 0.0 && (whole(factor) || whole(1.0 / factor))
}
