//! Names what is wrong with updates.

use super::rule::Rule;
use super::sums::{Rates, Sums};
use crate::audit::report::{Cause, Finding, UpdateRow, number, shown};

/// Smaller factors are those of something that did not happen.
const FACTOR_MIN: f64 = 1e-6;

/// A group with its sums for each rule.
pub(super) struct Judged<'a> {
    pub(super) names: Vec<String>,
    pub(super) lr: f64,
    pub(super) decay: f64,
    pub(super) sums: &'a [Sums],
}

impl Judged<'_> {
    pub(super) fn stated(&self) -> Rates {
        [self.lr, self.lr * self.decay]
    }

    /// Whether a rule with some learning rate and decay explains the update.
    pub(super) fn fits(&self, rule: usize, rates: Rates) -> bool {
        let sums = &self.sums[rule];
        sums.distance(rates) <= sums.bound(rates[0].abs().max(self.lr))
    }

    /// The same group by one rule alone.
    fn by_rule(&self, rule: usize) -> Judged<'_> {
        let Judged { lr, decay, .. } = *self;
        Judged { names: self.names.clone(), lr, decay, sums: &self.sums[rule..=rule] }
    }

    pub(super) fn row(&self) -> UpdateRow {
        let sums = &self.sums[0];
        let [lr_found, decay_found] = sums.nearest();
        let relative = |length: f64| if sums.change2 > 0.0 { length / sums.change2.sqrt() } else { length };
        let others = match self.names.len() {
            1 => String::new(),
            count => format!(" and {} more", count - 1),
        };
        UpdateRow {
            name: self.names[0].clone() + &others,
            lr: self.lr,
            lr_found,
            weight_decay: self.decay,
            weight_decay_found: if lr_found == 0.0 { 0.0 } else { decay_found / lr_found },
            residual: relative(sums.distance(self.stated())),
            bound: relative(sums.bound(self.lr)),
        }
    }

    fn finding(&self, cause: Cause, factor: Option<f64>, left: f64, text: String) -> Finding {
        let explains = 1.0 - (left / self.sums[0].distance(self.stated())).powi(2);
        Finding { cause, params: self.names.clone(), factor, explains, text }
    }
}

/// What is wrong with the updates.
pub(super) enum Explained {
    /// One cause explains all groups, or nothing is wrong.
    Whole(Vec<Finding>),
    /// What fits each group, or would if anything did.
    Apart(Vec<Finding>),
}

/// Names what is wrong with the updates, in the simplest way that fits all groups: one learning rate for another, one decay
/// for another, another rule, coarse weights; otherwise what fits each group.
pub(super) fn explain(groups: &[Judged<'_>], rules: &[Rule]) -> Explained {
    let wrong: Vec<&Judged<'_>> = groups.iter().filter(|group| !group.fits(0, group.stated())).collect();
    if wrong.is_empty() {
        return Explained::Whole(Vec::new());
    }
    if let Some(finding) = other_rate(groups) {
        return Explained::Whole(vec![finding]);
    }
    if wrong.iter().all(|group| group.lr > 0.0 && group.fits(0, [group.lr, group.sums[0].decay_alone()])) {
        return Explained::Whole(merged(wrong.iter().map(|group| other_decay(group)).collect()));
    }
    if let Some(finding) = other_rule(groups, rules).or_else(|| coarse_weights(groups)) {
        return Explained::Whole(vec![finding]);
    }
    Explained::Apart(merged(wrong.iter().map(|group| other(group)).collect()))
}

/// The first rule after that of the run file that explains all groups with another learning rate or decay: two faults.
pub(super) fn other_rule_and_rates(groups: &[Judged<'_>], rules: &[Rule]) -> Option<Vec<Finding>> {
    let is_rate = |finding: &Finding| matches!(finding.cause, Cause::LearningRate | Cause::WeightDecay);
    (1..rules.len()).find_map(|rule| {
        let alone: Vec<Judged<'_>> = groups.iter().map(|group| group.by_rule(rule)).collect();
        let (Explained::Whole(rates) | Explained::Apart(rates)) = explain(&alone, &rules[rule..=rule]);
        let Rule { text, factor, .. } = &rules[rule];
        let finding = groups[0].finding(Cause::UpdateRule, *factor, 0.0, text.clone());
        let finding = Finding { params: Vec::new(), ..finding };
        rates.iter().all(is_rate).then(|| [vec![finding], rates].concat())
    })
}

/// The first rule after that of the run file that explains all groups.
pub(super) fn other_rule(groups: &[Judged<'_>], rules: &[Rule]) -> Option<Finding> {
    let fits = |rule: &usize| groups.iter().all(|group| group.fits(*rule, group.stated()));
    let rule = (1..rules.len()).find(fits)?;
    let first = groups.iter().find(|group| !group.fits(0, group.stated()))?;
    let (left, Rule { text, factor, .. }) = (first.sums[rule].distance(first.stated()), &rules[rule]);
    Some(Finding { params: Vec::new(), ..first.finding(Cause::UpdateRule, *factor, left, text.clone()) })
}

/// Weights in `f32` that all are numbers of `bf16`, and differ from the stated ones by no more than that rounding.
fn coarse_weights(groups: &[Judged<'_>]) -> Option<Finding> {
    let text = "weights were rounded to bfloat16 after the update: there is no copy of them in float32";
    let finding = groups[0].finding(Cause::UpdateRule, None, 0.0, text.to_owned());
    groups.iter().all(|group| group.sums[0].is_rounded()).then_some(Finding { params: Vec::new(), ..finding })
}

/// All groups have the same factor of their learning rates.
fn other_rate(groups: &[Judged<'_>]) -> Option<Finding> {
    // Along the stated update, in units of it.
    let along = |group: &Judged<'_>| {
        let (fit, [lr, decay]) = (&group.sums[0].fit, group.stated());
        let update2 = lr * lr * fit.aa + 2.0 * lr * decay * fit.ab + decay * decay * fit.bb;
        (update2 + lr * fit.ad + decay * fit.bd, update2)
    };
    let (product, update2) =
        groups.iter().map(along).fold((0.0, 0.0), |all, one| (all.0 + one.0, all.1 + one.1));
    if update2 == 0.0 {
        return other_than_zero(groups);
    }
    let factor = nothing(product / update2);
    let fit = |group: &Judged<'_>| group.stated().map(|part| part * factor);
    groups.iter().all(|group| group.fits(0, fit(group))).then(|| {
        let first = groups
            .iter()
            .max_by(|left, right| left.sums[0].change2.total_cmp(&right.sums[0].change2))
            .expect("there are groups");
        let text = format!(
            "the learning rate is {}, the run file says {} for this step",
            number(factor * first.lr),
            number(first.lr)
        );
        let left = first.sums[0].distance(fit(first));
        Finding { params: Vec::new(), ..first.finding(Cause::LearningRate, Some(factor), left, text) }
    })
}

/// A factor, or 0 if it is that but for rounding.
fn nothing(factor: f64) -> f64 {
    if factor.abs() < FACTOR_MIN { 0.0 } else { factor }
}

/// The stated learning rate is 0, and the one that was used is not.
fn other_than_zero(groups: &[Judged<'_>]) -> Option<Finding> {
    let fit = |group: &Judged<'_>| {
        let lr = group.sums[0].rate_alone(group.decay);
        [lr, lr * group.decay]
    };
    groups.iter().all(|group| group.fits(0, fit(group))).then(|| {
        let group = &groups[0];
        let text =
            format!("the learning rate is {}, the run file says 0 for this step", number(fit(group)[0]));
        Finding {
            params: Vec::new(),
            ..group.finding(Cause::LearningRate, None, group.sums[0].distance(fit(group)), text)
        }
    })
}

/// A group has another learning rate.
pub(super) fn rate_of(group: &Judged<'_>, found: f64) -> Finding {
    let factor = (group.lr != 0.0).then(|| nothing(found / group.lr));
    let found = factor.map_or(found, |factor| group.lr * factor);
    let text = format!(
        "the learning rate of {} is {}, the run file says {} for this step",
        shown(&group.names),
        number(found),
        number(group.lr)
    );
    group.finding(Cause::LearningRate, factor, group.sums[0].distance([found, found * group.decay]), text)
}

/// A group has another decay.
pub(super) fn other_decay(group: &Judged<'_>) -> Finding {
    let sums = &group.sums[0];
    let found = sums.decay_alone() / group.lr;
    // As far as precision shows.
    let found = if found.abs() * group.lr * sums.fit.bb.sqrt() <= sums.bound(group.lr) { 0.0 } else { found };
    let factor = (group.decay != 0.0).then(|| found / group.decay);
    let text = format!(
        "weight decay is {}, the run file says {} for {}",
        number(found),
        number(group.decay),
        shown(&group.names)
    );
    group.finding(Cause::WeightDecay, factor, group.sums[0].distance([group.lr, found * group.lr]), text)
}

/// What fits a group by itself.
fn other(group: &Judged<'_>) -> Finding {
    let (fit, sums) = (group.sums[0].nearest(), &group.sums[0]);
    let rate = sums.rate_alone(group.decay);
    if group.fits(0, [rate, rate * group.decay]) {
        return rate_of(group, rate);
    }
    if group.fits(0, fit) {
        let factor = (group.lr != 0.0).then(|| fit[0] / group.lr);
        let text = format!(
            "the learning rate of {} is {} and the weight decay {}, the run file says {} and {}",
            shown(&group.names),
            number(fit[0]),
            number(if fit[0] == 0.0 { 0.0 } else { fit[1] / fit[0] }),
            number(group.lr),
            number(group.decay)
        );
        return group.finding(Cause::LearningRate, factor, sums.distance(fit), text);
    }
    let text = format!(
        "the update of {} does not follow the rule of the run file: the best learning rate and decay leave {} % of it, where \
         precision leaves {} %",
        shown(&group.names),
        number(100.0 * sums.distance(fit) / sums.change2.sqrt()),
        number(100.0 * sums.bound(fit[0].abs()) / sums.change2.sqrt())
    );
    group.finding(Cause::UpdateRule, None, sums.distance(fit), text)
}

/// The same finding for several groups is one; its sentence then names all of their parameters.
pub(super) fn merged(findings: Vec<Finding>) -> Vec<Finding> {
    let mut merged: Vec<Finding> = Vec::new();
    for finding in findings {
        let is_same = |other: &&mut Finding| {
            let factors = other.factor.zip(finding.factor);
            other.cause == finding.cause
                && factors.map_or(other.text == finding.text, |(left, right)| {
                    (left - right).abs() <= 1e-3 * left.abs().max(FACTOR_MIN)
                })
        };
        match merged.iter_mut().find(|other| is_same(other)) {
            Some(other) => {
                let before = shown(&other.params);
                other.params.extend(finding.params);
                other.text = other.text.replace(&before, &shown(&other.params));
            }
            None => merged.push(finding),
        }
    }
    merged
}
