//! Judges the update by itself, given the gradient that it used: moments, learning rate, weight decay, bias correction,
//! epsilon.
//!
//! The update of AdamW, Lion and SGD is -lr * (direction + decay * parameter). The direction follows from the state after the
//! step, so learning rate and decay are the solution of two linear equations for each group of parameters.

use std::collections::BTreeMap;

use fsdp_core::model::{ModelSpec, ParamId};
use fsdp_nn::update::GroupSettings;

use super::report::{Cause, Finding, UpdateRow};
use super::scale::{number, shown};
use super::state::{Undo, blocks};
use super::sums::Around;
use crate::config::{AdamwConfig, OptimizerConfig};
use crate::error::TrainError;

/// Roundings of an element in one update, of its parameter and of its direction.
const ROUNDINGS: f64 = 8.0;

/// Values of epsilon that programs use.
const EPSILONS: [f64; 13] =
    [0.0, 1e-20, 1e-16, 1e-15, 1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3];

/// Values of an element around the step.
struct Element {
    /// The first moment after the step.
    first: f64,
    /// The first moment before the step.
    first_before: f64,
    /// The second moment after the step; 0 if the rule has none.
    second: f64,
    /// The gradient that the update used.
    gradient: f64,
}

/// How a direction follows from the state.
type Direction = Box<dyn Fn(&Element, u64) -> f64>;

/// A rule, with what the user reads if it explains the update and the stated one does not.
struct Rule {
    text: String,
    direction: Direction,
}

/// Sums over the elements of a group. `a` is the direction, `p` the parameter before, and `d` its change, less the stated one:
/// what is nearly zero is summed itself, not as the difference of large sums.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    /// The stated learning rate, and its product with weight decay.
    stated: Fit,
    aa: f64,
    ap: f64,
    ad: f64,
    pp: f64,
    pd: f64,
    dd: f64,
    /// Of the squares of the whole change.
    change2: f64,
    /// Of the squares of what rounding of the parameter may cause.
    param_rounding2: f64,
    /// Of the squares of the direction's rounding, for a learning rate of 1.
    direction_rounding2: f64,
}

/// Learning rate, and its product with weight decay.
type Fit = [f64; 2];

impl Sums {
    /// The distance of the update from that with a learning rate and a decay.
    fn distance(&self, fit: Fit) -> f64 {
        let [lr, decay] = std::array::from_fn(|index| fit[index] - self.stated[index]);
        let square = self.dd
            + lr * lr * self.aa
            + decay * decay * self.pp
            + 2.0 * (lr * self.ad + decay * self.pd + lr * decay * self.ap);
        square.max(0.0).sqrt()
    }

    /// The learning rate and decay that explain the update best.
    fn fit(&self) -> Fit {
        let [lr, decay] = self.stated;
        let determinant = self.aa * self.pp - self.ap * self.ap;
        if determinant <= 1e-12 * self.aa * self.pp {
            return [if self.aa > 0.0 { lr - self.ad / self.aa } else { lr }, decay];
        }
        [
            lr + (self.pd * self.ap - self.ad * self.pp) / determinant,
            decay + (self.ad * self.ap - self.pd * self.aa) / determinant,
        ]
    }

    /// The decay that explains the update best with the stated learning rate, times that.
    fn decay_alone(&self) -> f64 {
        if self.pp > 0.0 { self.stated[1] - self.pd / self.pp } else { self.stated[1] }
    }

    /// The learning rate that explains the update best with a weight decay.
    fn rate_alone(&self, decay: f64) -> f64 {
        let update2 = self.aa + 2.0 * decay * self.ap + decay * decay * self.pp;
        if update2 > 0.0 { self.stated[0] - (self.ad + decay * self.pd) / update2 } else { self.stated[0] }
    }

    fn bound(&self, lr: f64) -> f64 {
        ROUNDINGS * (self.param_rounding2 + lr * lr * self.direction_rounding2).sqrt()
    }
}

/// Sums of the second moment: `v` before, `q` the square of the gradient, `d` the moment after, less the stated one.
#[derive(Clone, Copy, Debug, Default)]
struct Seconds {
    vv: f64,
    qv: f64,
    qq: f64,
    dd: f64,
    dv: f64,
    dq: f64,
    /// Of the squares of the rounding of the moment, and of `q` for a gain of 1.
    rounding2: f64,
    square_rounding2: f64,
}

/// Parameters with the same settings.
struct Group {
    params: Vec<ParamId>,
    settings: GroupSettings,
}

/// What the step should have done.
pub(super) struct Expected<'a> {
    pub(super) optimizer: &'a OptimizerConfig,
    /// Learning rate of the step, before factors of groups.
    pub(super) lr: f64,
    /// Settings of each trained parameter.
    pub(super) settings: BTreeMap<ParamId, GroupSettings>,
    /// Number of the step among the steps of each parameter, from 1.
    pub(super) own_steps: BTreeMap<ParamId, u64>,
    /// What the judgement of the gradient has found.
    pub(super) found: &'a [Finding],
}

/// Judges the update of each group.
///
/// # Errors
/// Errors of reading.
pub(super) fn judge(
    around: &mut Around<'_>,
    expected: &Expected<'_>,
) -> Result<(Vec<Finding>, Vec<UpdateRow>), TrainError> {
    let mut findings = Vec::new();
    let mut optimizer = expected.optimizer.clone();
    let has_other_first = expected.found.iter().any(|finding| finding.cause == Cause::UpdateRule);
    let has_l2 = expected.found.iter().any(|finding| finding.cause == Cause::WeightDecay);
    if let OptimizerConfig::Adamw(config) = &mut optimizer {
        if has_other_first {
            // Bias correction would repeat the finding.
            return Ok((findings, Vec::new()));
        }
        if let Some((finding, beta2)) = second_moments(around, config, expected)? {
            findings.push(finding);
            config.betas[1] = beta2;
        }
    }
    let rules = rules(&optimizer);
    let mut groups = groups(around.spec, expected);
    // What is in the gradient is not taken from the parameter again.
    if has_l2 || around.moments.is_coupled {
        groups.iter_mut().for_each(|group| group.settings.weight_decay = 0.0);
    }
    let sums =
        groups.iter().map(|group| sums(around, group, &rules, expected)).collect::<Result<Vec<_>, _>>()?;
    let judged: Vec<Judged<'_>> = groups
        .iter()
        .zip(&sums)
        .map(|(group, sums)| {
            let lr = expected.lr * group.settings.lr_scale;
            let names = group.params.iter().map(|id| around.spec.param(*id).fqn.clone()).collect();
            Judged { names, lr, decay: group.settings.weight_decay, sums }
        })
        .collect();
    let explained = explain(&judged, &rules);
    let is_open = |finding: &Finding| finding.cause == Cause::UpdateRule && !finding.params.is_empty();
    if explained.iter().any(is_open)
        && let Some(by_param) = by_parameter(around, &groups, &rules, expected)?
    {
        findings.extend(by_param);
    } else {
        findings.extend(explained);
    }
    Ok((findings, judged.iter().map(Judged::row).collect()))
}

/// Takes back the update that the run file asks for; `None` for a rule other than AdamW.
pub(super) fn undo(expected: &Expected<'_>) -> Option<Undo> {
    let OptimizerConfig::Adamw(config) = expected.optimizer else { return None };
    let rule = adamw_rules(config).swap_remove(0);
    let (settings, own_steps, lr) = (expected.settings.clone(), expected.own_steps.clone(), expected.lr);
    Some(Box::new(move |id, value, [first, second]| {
        let Some(settings) = settings.get(&id) else { return value };
        let lr = lr * settings.lr_scale;
        let element = Element { first, first_before: 0.0, second, gradient: 0.0 };
        (value + lr * (rule.direction)(&element, own_steps[&id])) / (1.0 - lr * settings.weight_decay)
    }))
}

fn groups(spec: &ModelSpec, expected: &Expected<'_>) -> Vec<Group> {
    let mut groups: Vec<(bool, Group)> = Vec::new();
    for (id, settings) in &expected.settings {
        // What programs exclude from weight decay.
        let is_vector = spec.param(*id).shape.len() < 2;
        let is_same = |(vector, group): &&mut (bool, Group)| {
            *vector == is_vector
                && group.settings.lr_scale == settings.lr_scale
                && group.settings.weight_decay == settings.weight_decay
        };
        match groups.iter_mut().find(|group| is_same(group)) {
            Some((_, group)) => group.params.push(*id),
            None => groups.push((is_vector, Group { params: vec![*id], settings: *settings })),
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}

/// The rule of the run file first, then those that it is mistaken for.
fn rules(optimizer: &OptimizerConfig) -> Vec<Rule> {
    let rule = |text: &str, direction: Direction| Rule { text: text.to_owned(), direction };
    match optimizer {
        OptimizerConfig::Adamw(config) => adamw_rules(config),
        OptimizerConfig::Lion(config) => {
            let beta = config.betas[0];
            vec![rule(
                "",
                Box::new(move |at, _| {
                    let value = beta * at.first_before + (1.0 - beta) * at.gradient;
                    if value == 0.0 { 0.0 } else { value.signum() }
                }),
            )]
        }
        OptimizerConfig::Sgd(config) => {
            let (momentum, nesterov) = (config.momentum, config.nesterov);
            let plain = rule("momentum is not that of Nesterov", Box::new(|at, _| at.first));
            let ahead = rule(
                "momentum is that of Nesterov",
                Box::new(move |at, _| at.gradient + momentum * at.first),
            );
            if nesterov { vec![ahead, plain] } else { vec![plain, ahead] }
        }
        _ => Vec::new(),
    }
}

fn adamw_rules(config: &AdamwConfig) -> Vec<Rule> {
    let ([beta1, beta2], eps) = (config.betas, config.eps);
    let correction = |beta: f64, step: u64| 1.0 - beta.powi(i32::try_from(step).unwrap_or(i32::MAX));
    let corrected = move |shift: i64, eps: f64| -> Direction {
        Box::new(move |at, step| {
            let step = step.saturating_add_signed(shift).max(1);
            let root = (at.second / correction(beta2, step)).sqrt() + eps;
            if root == 0.0 { 0.0 } else { at.first / correction(beta1, step) / root }
        })
    };
    let rule = |text: &str, direction: Direction| Rule { text: text.to_owned(), direction };
    let mut rules = vec![
        rule("", corrected(0, eps)),
        rule(
            "moments are not corrected for their bias",
            Box::new(move |at, _| at.first / (at.second.sqrt() + eps)),
        ),
        rule(
            "only the first moment is corrected for its bias",
            Box::new(move |at, step| at.first / correction(beta1, step) / (at.second.sqrt() + eps)),
        ),
        rule(
            "only the second moment is corrected for its bias",
            Box::new(move |at, step| at.first / ((at.second / correction(beta2, step)).sqrt() + eps)),
        ),
        rule("the bias of moments is corrected for one step too many", corrected(1, eps)),
        rule("the bias of moments is corrected for one step too few", corrected(-1, eps)),
        rule(
            "epsilon is added to the second moment before its root is taken",
            Box::new(move |at, step| {
                at.first / correction(beta1, step) / (at.second / correction(beta2, step) + eps).sqrt()
            }),
        ),
        rule(
            "epsilon is added before the second moment is corrected for its bias",
            Box::new(move |at, step| {
                at.first * correction(beta2, step).sqrt() / correction(beta1, step) / (at.second.sqrt() + eps)
            }),
        ),
    ];
    for other in EPSILONS.into_iter().filter(|other| *other != eps) {
        rules.push(rule(&format!("epsilon is {other:e}, the run file says {eps:e}"), corrected(0, other)));
    }
    rules
}

/// The sums of a group, for each rule.
fn sums(
    around: &mut Around<'_>,
    group: &Group,
    rules: &[Rule],
    expected: &Expected<'_>,
) -> Result<Vec<Sums>, TrainError> {
    let lr = expected.lr * group.settings.lr_scale;
    let stated = [lr, lr * group.settings.weight_decay];
    let mut sums = vec![Sums { stated, ..Sums::default() }; rules.len()];
    for &id in &group.params {
        let unit = around.after.param_rounding(id);
        let moment_unit =
            around.after.moment_rounding(id, around.moments.first).max(unit.min(2f64.powi(-24)));
        let own_step = expected.own_steps[&id];
        for rows in blocks(around.spec, id) {
            let [before, after] = around.first_moments(id, rows.clone())?;
            let second = around.after.moment(id, SECOND, rows.clone())?;
            let params = [around.before.param(id, rows.clone())?, around.after.param(id, rows)?];
            for at in 0..before.len() {
                let gradient = around.moments.gradient(before[at], after[at]);
                let element =
                    Element { first: after[at], first_before: before[at], second: second[at], gradient };
                let (p, change) = (params[0][at], params[1][at] - params[0][at]);
                for (rule, sums) in rules.iter().zip(&mut sums) {
                    let direction = (rule.direction)(&element, own_step);
                    sums.aa += direction * direction;
                    sums.ap += direction * p;
                    let d = change + stated[0] * direction + stated[1] * p;
                    sums.ad += direction * d;
                    sums.pp += p * p;
                    sums.pd += p * d;
                    sums.dd += d * d;
                    sums.change2 += change * change;
                    sums.param_rounding2 += (unit * params[1][at].abs().max(p.abs())).powi(2);
                    sums.direction_rounding2 += (moment_unit * direction).powi(2);
                }
            }
        }
    }
    Ok(sums)
}

/// Smaller factors are those of something that did not happen.
const FACTOR_MIN: f64 = 1e-6;

/// Name of the second moment.
const SECOND: &str = "exp_avg_sq";

/// A group with its sums for each rule.
struct Judged<'a> {
    names: Vec<String>,
    lr: f64,
    decay: f64,
    sums: &'a [Sums],
}

impl Judged<'_> {
    fn stated(&self) -> Fit {
        [self.lr, self.lr * self.decay]
    }

    /// Whether a rule with some learning rate and decay explains the update.
    fn fits(&self, rule: usize, fit: Fit) -> bool {
        let sums = &self.sums[rule];
        sums.distance(fit) <= sums.bound(fit[0].abs().max(self.lr))
    }

    fn row(&self) -> UpdateRow {
        let sums = &self.sums[0];
        let [lr_found, decay_found] = sums.fit();
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

/// Explains updates by another decay or learning rate of some parameters of a group; `None` if that does not explain them all.
fn by_parameter(
    around: &mut Around<'_>,
    groups: &[Group],
    rules: &[Rule],
    expected: &Expected<'_>,
) -> Result<Option<Vec<Finding>>, TrainError> {
    let mut findings = Vec::new();
    for group in groups {
        for id in &group.params {
            let one = Group { params: vec![*id], settings: group.settings };
            let sums = sums(around, &one, &rules[..1], expected)?;
            let lr = expected.lr * group.settings.lr_scale;
            let names = vec![around.spec.param(*id).fqn.clone()];
            let judged = Judged { names, lr, decay: group.settings.weight_decay, sums: &sums };
            if judged.fits(0, judged.stated()) {
                continue;
            }
            let rate = judged.sums[0].rate_alone(judged.decay);
            if lr > 0.0 && judged.fits(0, [lr, judged.sums[0].decay_alone()]) {
                findings.push(other_decay(&judged));
            } else if judged.fits(0, [rate, rate * judged.decay]) {
                findings.push(rate_of(&judged, rate));
            } else {
                return Ok(None);
            }
        }
    }
    Ok(Some(merged(findings)))
}

/// Names what is wrong with the updates, in the simplest way that fits all groups: one learning rate for another, one decay
/// for another, another rule; otherwise what fits each group.
fn explain(groups: &[Judged<'_>], rules: &[Rule]) -> Vec<Finding> {
    let wrong: Vec<&Judged<'_>> = groups.iter().filter(|group| !group.fits(0, group.stated())).collect();
    if wrong.is_empty() {
        return Vec::new();
    }
    if let Some(finding) = other_rate(groups) {
        return vec![finding];
    }
    if wrong.iter().all(|group| group.lr > 0.0 && group.fits(0, [group.lr, group.sums[0].decay_alone()])) {
        return merged(wrong.iter().map(|group| other_decay(group)).collect());
    }
    let is_rule = |rule: &usize| groups.iter().all(|group| group.fits(*rule, group.stated()));
    if let Some(rule) = (1..rules.len()).find(is_rule) {
        let mut finding = wrong[0].finding(
            Cause::UpdateRule,
            None,
            wrong[0].sums[rule].distance(wrong[0].stated()),
            rules[rule].text.clone(),
        );
        finding.params = Vec::new();
        return vec![finding];
    }
    merged(wrong.iter().map(|group| other(group)).collect())
}

/// All groups have the same factor of their learning rates.
fn other_rate(groups: &[Judged<'_>]) -> Option<Finding> {
    // Along the stated update, in units of it.
    let along = |group: &Judged<'_>| {
        let (sums, [lr, decay]) = (&group.sums[0], group.stated());
        let update2 = lr * lr * sums.aa + 2.0 * lr * decay * sums.ap + decay * decay * sums.pp;
        (update2 - (lr * sums.ad + decay * sums.pd), update2)
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
fn rate_of(group: &Judged<'_>, found: f64) -> Finding {
    let found = group.lr * nothing(found / group.lr);
    let factor = (group.lr != 0.0).then(|| found / group.lr);
    let text = format!(
        "the learning rate of {} is {}, the run file says {} for this step",
        shown(&group.names),
        number(found),
        number(group.lr)
    );
    group.finding(Cause::LearningRate, factor, group.sums[0].distance([found, found * group.decay]), text)
}

/// A group has another decay.
fn other_decay(group: &Judged<'_>) -> Finding {
    let sums = &group.sums[0];
    let found = sums.decay_alone() / group.lr;
    // As far as precision shows.
    let found = if found.abs() * group.lr * sums.pp.sqrt() <= sums.bound(group.lr) { 0.0 } else { found };
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
    let (fit, sums) = (group.sums[0].fit(), &group.sums[0]);
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

/// Whether second moments follow from the gradient; otherwise what is wrong, and the decay that fits.
fn second_moments(
    around: &mut Around<'_>,
    config: &AdamwConfig,
    expected: &Expected<'_>,
) -> Result<Option<(Finding, f64)>, TrainError> {
    let beta = config.betas[1];
    let mut sums = Seconds::default();
    for id in expected.settings.keys().copied() {
        let [first_unit, unit] =
            [around.moments.first, SECOND].map(|name| around.after.moment_rounding(id, name));
        for rows in blocks(around.spec, id) {
            let [before, after] = around.first_moments(id, rows.clone())?;
            let [old, new] =
                [around.before.moment(id, SECOND, rows.clone())?, around.after.moment(id, SECOND, rows)?];
            for at in 0..old.len() {
                let gradient = around.moments.gradient(before[at], after[at]);
                let (v, n, q) = (old[at], new[at], gradient * gradient);
                let d = n - beta * v - (1.0 - beta) * q;
                sums.vv += v * v;
                sums.qv += q * v;
                sums.qq += q * q;
                sums.dd += d * d;
                sums.dv += d * v;
                sums.dq += d * q;
                let error = first_unit * (after[at].abs() + before[at].abs()) / around.moments.gain;
                sums.rounding2 += (unit * n).powi(2);
                sums.square_rounding2 += (2.0 * gradient * error + error * error).powi(2);
            }
        }
    }
    let distance = |decay: f64, gain: f64| {
        let (decay, gain) = (decay - beta, gain - (1.0 - beta));
        let square = sums.dd + decay * decay * sums.vv + gain * gain * sums.qq
            - 2.0 * (decay * sums.dv + gain * sums.dq - decay * gain * sums.qv);
        square.max(0.0).sqrt()
    };
    let bound = |gain: f64| ROUNDINGS * (sums.rounding2 + gain * gain * sums.square_rounding2).sqrt();
    if distance(beta, 1.0 - beta) <= bound(1.0 - beta) {
        return Ok(None);
    }
    let determinant = sums.vv * sums.qq - sums.qv * sums.qv;
    let decay = beta + (sums.dv * sums.qq - sums.dq * sums.qv) / determinant;
    let gain = 1.0 - beta + (sums.dq * sums.vv - sums.dv * sums.qv) / determinant;
    let explains = 1.0 - (distance(decay, gain) / distance(beta, 1.0 - beta)).powi(2);
    let (text, beta) = match determinant > 0.0 && distance(decay, gain) <= bound(gain) {
        true => {
            let text = format!(
                "the second moment decays by {} and takes up {} of the squared gradient; the run file says {} and {}",
                number(decay),
                number(gain),
                number(beta),
                number(1.0 - beta)
            );
            (text, decay)
        }
        false => ("the second moment does not follow from the gradient".to_owned(), beta),
    };
    Ok(Some((Finding { cause: Cause::UpdateRule, params: Vec::new(), factor: None, explains, text }, beta)))
}

/// The same finding for several groups is one; its sentence then names all of their parameters.
fn merged(findings: Vec<Finding>) -> Vec<Finding> {
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
