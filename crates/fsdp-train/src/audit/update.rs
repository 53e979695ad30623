//! Judges the update by itself, given the gradient that it used: moments, learning rate, weight decay, bias correction,
//! epsilon.
//!
//! The update of AdamW, Lion and SGD is -lr * (direction + decay * parameter). The direction follows from the state after the
//! step, so learning rate and decay are the solution of two linear equations for each group of parameters.

mod expected;
mod explain;
mod fitted;
mod rule;
mod second;
mod sums;

use fsdp_config::OptimizerConfig;
use fsdp_core::model::ModelSpec;

use self::expected::{Group, LARGEST};
use self::explain::{
    Explained, Judged, explain, merged, other_decay, other_rule, other_rule_and_rates, rate_of,
};
use self::fitted::{epsilon_beside_rates, fitted_rules};
use self::rule::{Rule, rules};
use self::second::second_moments;
use self::sums::{Sums, sums};
use super::report::{Cause, Finding, UpdateRow};
use super::state::Undo;
use super::sums::Around;
use crate::error::TrainError;

pub(super) use self::expected::{Expected, SECOND};
pub(super) use self::rule::{Direction, Element, direction};
pub(super) use self::sums::ROUNDINGS;

/// Judges the update of each group.
///
/// # Errors
/// Errors of reading.
pub(super) fn judge(
    around: &mut Around<'_>,
    expected: &Expected<'_>,
) -> Result<(Vec<Finding>, Vec<UpdateRow>), TrainError> {
    // Without a first moment the gradient was derived from the update, and an open moment would be found again in it.
    if around.moments.first.is_none() || around.is_open {
        return Ok((Vec::new(), Vec::new()));
    }
    let mut findings = Vec::new();
    let mut optimizer = expected.optimizer.clone();
    match &mut optimizer {
        OptimizerConfig::Adamw(config) => {
            config.betas[0] = around.moments.decay;
            if let Some((finding, beta2)) = second_moments(around, config, expected)? {
                // The first moment may have taken up other shares than those of the run file: then nothing follows from it.
                let is_open = |found: &Finding| found.cause == Cause::Unexplained;
                if finding.explains == 0.0 && expected.found.iter().any(is_open) {
                    return Ok((Vec::new(), Vec::new()));
                }
                findings.push(finding);
                config.betas[1] = beta2;
            }
        }
        OptimizerConfig::Sgd(config) => config.momentum = around.moments.decay,
        _ => {}
    }
    let mut rules = rules(&optimizer);
    if let OptimizerConfig::Adamw(config) = &optimizer
        && expected.settings.keys().any(|id| around.after.has(*id, LARGEST))
    {
        rules.push(Rule::of_largest(config));
    }
    let mut groups = groups(around.spec, expected);
    // What is in the gradient is not taken from the parameter again.
    if around.moments.is_coupled || expected.found.iter().any(|finding| finding.cause == Cause::WeightDecay) {
        groups.iter_mut().for_each(|group| group.settings.weight_decay = 0.0);
    }
    let sums = all_sums(around, &groups, &rules, expected)?;
    let judged = judged(around.spec, &groups, &sums, expected);
    let rows = judged.iter().map(Judged::row).collect();
    findings.extend(match explain(&judged, &rules) {
        Explained::Whole(explained) => explained,
        Explained::Apart(explained) => {
            let is_open = explained.iter().any(|finding| finding.cause == Cause::UpdateRule);
            match by_fitted_rule(around, &optimizer, (&groups, &judged), expected)? {
                Some(finding) => vec![finding],
                None if is_open => match by_parameter(around, &groups, &rules, expected)? {
                    Some(finding) => finding,
                    None => {
                        by_two(around, &optimizer, (&groups, &judged, &rules), expected)?.unwrap_or(explained)
                    }
                },
                None => explained,
            }
        }
    });
    Ok((findings, rows))
}

/// The sums of each group, for each rule.
fn all_sums(
    around: &mut Around<'_>,
    groups: &[Group],
    rules: &[Rule],
    expected: &Expected<'_>,
) -> Result<Vec<Vec<Sums>>, TrainError> {
    groups.iter().map(|group| sums(around, group, rules, expected)).collect()
}

fn judged<'a>(
    spec: &ModelSpec,
    groups: &[Group],
    sums: &'a [Vec<Sums>],
    expected: &Expected<'_>,
) -> Vec<Judged<'a>> {
    let judged = |(group, sums): (&Group, &'a Vec<Sums>)| {
        let lr = expected.lr * group.settings.lr_scale;
        let names = group.params.iter().map(|id| spec.param(*id).fqn.clone()).collect();
        Judged { names, lr, decay: group.settings.weight_decay, sums }
    };
    groups.iter().zip(sums).map(judged).collect()
}

/// Explains all updates by a rule of AdamW with other numbers.
fn by_fitted_rule(
    around: &mut Around<'_>,
    optimizer: &OptimizerConfig,
    found: (&[Group], &[Judged<'_>]),
    expected: &Expected<'_>,
) -> Result<Option<Finding>, TrainError> {
    let OptimizerConfig::Adamw(config) = optimizer else { return Ok(None) };
    let mut rules = rules(optimizer);
    rules.truncate(1);
    rules.extend(fitted_rules(around, config, found, expected)?);
    let sums = all_sums(around, found.0, &rules, expected)?;
    Ok(other_rule(&judged(around.spec, found.0, &sums, expected), &rules))
}

/// Explains all updates by another rule, or another epsilon of AdamW, beside another learning rate or decay.
fn by_two(
    around: &mut Around<'_>,
    optimizer: &OptimizerConfig,
    (groups, found, rules): (&[Group], &[Judged<'_>], &[Rule]),
    expected: &Expected<'_>,
) -> Result<Option<Vec<Finding>>, TrainError> {
    let by_rule = other_rule_and_rates(found, rules);
    let OptimizerConfig::Adamw(config) = optimizer else { return Ok(by_rule) };
    if by_rule.is_some() {
        return Ok(by_rule);
    }
    let Some(rule) = epsilon_beside_rates(around, config, (groups, found), expected)? else {
        return Ok(None);
    };
    let mut rules = self::rules(optimizer);
    rules.truncate(1);
    rules.push(rule);
    let sums = all_sums(around, groups, &rules, expected)?;
    Ok(other_rule_and_rates(&judged(around.spec, groups, &sums, expected), &rules))
}

/// Takes back the update that the run file asks for; `None` for a rule other than AdamW.
pub(super) fn undo(expected: &Expected<'_>) -> Option<Undo> {
    let OptimizerConfig::Adamw(_) = expected.optimizer else { return None };
    let direction = direction(expected.optimizer)?;
    let (settings, own_steps, lr) = (expected.settings.clone(), expected.own_steps.clone(), expected.lr);
    Some(Box::new(move |id, value, [first, second]| {
        let Some(settings) = settings.get(&id) else { return value };
        let lr = lr * settings.lr_scale;
        let element = Element { first, second, ..Element::default() };
        let direction = direction(&element, own_steps[&id]).unwrap_or(0.0);
        (value + lr * direction) / (1.0 - lr * settings.weight_decay)
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

#[cfg(test)]
mod tests;
