//! Judges the update by itself, given the gradient that it used: moments, learning rate, weight decay, bias correction,
//! epsilon.
//!
//! The update of AdamW, Lion and SGD is -lr * (direction + decay * parameter). The direction follows from the state after the
//! step, so learning rate and decay are the solution of two linear equations for each group of parameters.

mod explain;
mod rule;
mod second;
mod sums;

use std::collections::BTreeMap;

use fsdp_core::model::{ModelSpec, ParamId};
use fsdp_nn::update::GroupSettings;

use self::explain::{Judged, explain, merged, other_decay, rate_of};
use self::rule::{Element, Rule, adamw_rules, rules};
use self::second::second_moments;
use self::sums::sums;
use super::report::{Cause, Finding, UpdateRow};
use super::state::Undo;
use super::sums::Around;
use crate::config::OptimizerConfig;
use crate::error::TrainError;

/// Name of the second moment.
const SECOND: &str = "exp_avg_sq";

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
