//! Creates update rules from the configured optimizer.

use std::collections::{BTreeMap, BTreeSet};

use fsdp_config::{AdamwConfig, FqnPatterns, MuonConfig, OptimizerConfig, TrainConfig};
use fsdp_core::model::{ModelSpec, ParamId};
use fsdp_nn::update::{
    Adafactor, AdafactorOptions, AdamW, AdamW8bit, Ema, GroupSettings, Groups, Lion, Muon, MuonOptions, Part,
    Rule, ScheduleFree, Sgd,
};

use crate::error::TrainError;

/// By name, the steps of the run that were done before the first step of a parameter; parameters that are not listed
/// have taken part in all steps. It is empty but for runs that continue a checkpoint of another trainer in which the
/// optimizer had no state of a parameter, or had counted fewer steps of it.
pub type LateParams = BTreeMap<String, u64>;

/// Creates the update rule of a configuration, including the moving average of parameters if one is configured.
///
/// # Errors
/// [`TrainError::Misfit`] for a pattern of `no_decay` or of a group that matches nothing.
pub(crate) fn rule(config: &TrainConfig, spec: &ModelSpec) -> Result<Rule, TrainError> {
    delayed_rule(config, spec, &LateParams::new())
}

/// Like [`rule`], in a run in which some parameters begin later than the others.
///
/// # Errors
/// As [`rule`].
pub(crate) fn delayed_rule(
    config: &TrainConfig,
    spec: &ModelSpec,
    late: &LateParams,
) -> Result<Rule, TrainError> {
    let steps = |id: usize| Some((ParamId(id), *late.get(&spec.params[id].fqn)?));
    let delayed = (0..spec.params.len()).filter_map(steps);
    let groups = settings(&config.optimizer, spec)?;
    let groups = delayed.fold(groups, |groups, (id, steps)| groups.delayed(id, steps));
    let part: Part = match &config.optimizer {
        OptimizerConfig::Adamw(c) => adamw(c, groups).into(),
        OptimizerConfig::Adamw8bit(c) => AdamW8bit::new(adamw(c, groups), spec).into(),
        OptimizerConfig::Sgd(c) => {
            Sgd { momentum: c.momentum, dampening: c.dampening, nesterov: c.nesterov, groups }.into()
        }
        OptimizerConfig::Adafactor(c) => {
            let options = AdafactorOptions {
                eps: (c.eps[0], c.eps[1]),
                clip_threshold: c.clip_threshold,
                decay_rate: c.decay_rate,
                beta1: c.beta1,
                scale_parameter: c.scale_parameter,
                relative_step: c.relative_step,
                warmup_init: c.warmup_init,
                groups,
            };
            Adafactor::new(options, spec).into()
        }
        OptimizerConfig::Lion(c) => Lion { betas: (c.betas[0], c.betas[1]), groups }.into(),
        OptimizerConfig::Muon(c) => Muon::new(muon(c, groups), spec, &matrices(c, spec)?).into(),
        OptimizerConfig::ScheduleFree(c) => {
            let (betas, eps, warmup_steps) = ((c.betas[0], c.betas[1]), c.eps, c.warmup_steps);
            ScheduleFree { betas, eps, warmup_steps, groups }.into()
        }
    };
    let rule = Rule::new(part);
    Ok(match config.ema_decay {
        Some(decay) => rule.then(Ema { decay }),
        None => rule,
    })
}

fn adamw(config: &AdamwConfig, groups: Groups) -> AdamW {
    AdamW { betas: (config.betas[0], config.betas[1]), eps: config.eps, groups }
}

fn muon(config: &MuonConfig, groups: Groups) -> MuonOptions {
    let [beta1, beta2] = config.adamw_betas;
    MuonOptions {
        momentum: config.momentum,
        nesterov: config.nesterov,
        eps: config.eps,
        adjust_lr: config.adjust_lr_fn,
        adamw: AdamW { betas: (beta1, beta2), eps: config.adamw_eps, groups },
    }
}

/// The parameters that Muon orthogonalizes: hidden matrices that no pattern assigns to AdamW.
fn matrices(config: &MuonConfig, spec: &ModelSpec) -> Result<BTreeSet<ParamId>, TrainError> {
    let excluded = matching(spec, "train.optimizer.adamw_params", &config.adamw_params)?;
    Ok(&Muon::hidden_matrices(spec) - &excluded)
}

/// Parameters updated by one rule, with its default settings.
struct RuleParams {
    rule: Option<&'static str>,
    params: BTreeSet<ParamId>,
    settings: GroupSettings,
}

/// Divides all parameters of a model among the rules that update them.
fn rule_params(config: &OptimizerConfig, spec: &ModelSpec) -> Result<Vec<RuleParams>, TrainError> {
    let all: BTreeSet<ParamId> = (0..spec.params.len()).map(ParamId).collect();
    let settings = GroupSettings { lr_scale: 1.0, weight_decay: config.weight_decay(), late: 0 };
    let OptimizerConfig::Muon(c) = config else {
        return Ok(vec![RuleParams { rule: None, params: all, settings }]);
    };
    let matrices = matrices(c, spec)?;
    let adamw_settings =
        GroupSettings { lr_scale: c.adamw_lr / c.lr, weight_decay: c.adamw_weight_decay, late: 0 };
    let others = &all - &matrices;
    Ok(vec![
        RuleParams { rule: Some("muon"), params: matrices, settings },
        RuleParams { rule: Some("adamw"), params: others, settings: adamw_settings },
    ])
}

/// Parameters that are updated with the same settings.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamGroup {
    /// The patterns of the run file that select them; empty for the group of all others.
    pub patterns: Vec<String>,
    /// The rule that updates them; `None` if the optimizer has only one.
    pub rule: Option<&'static str>,
    /// The settings of their updates.
    pub settings: GroupSettings,
    /// The parameters, in the order of the model, frozen ones included.
    pub params: Vec<ParamId>,
}

/// Assigns every parameter of a model to the first group that matches it: the entries of `group` in order, then
/// `no_decay`, then all others. Each group appears once for every rule of the optimizer, and may be empty.
///
/// # Errors
/// [`TrainError::Misfit`] for a pattern that matches nothing.
pub fn param_groups(config: &OptimizerConfig, spec: &ModelSpec) -> Result<Vec<ParamGroup>, TrainError> {
    let rules = rule_params(config, spec)?;
    let mut remaining: BTreeSet<ParamId> = (0..spec.params.len()).map(ParamId).collect();
    let mut groups = Vec::new();
    let mut add =
        |patterns: &[String], params: &BTreeSet<ParamId>, adjust: &dyn Fn(GroupSettings) -> GroupSettings| {
            groups.extend(rules.iter().map(|rule| ParamGroup {
                patterns: patterns.to_vec(),
                rule: rule.rule,
                settings: adjust(rule.settings),
                params: rule.params.intersection(params).copied().collect(),
            }));
        };
    for group in config.groups() {
        let matched = matching(spec, "train.optimizer.group", &group.patterns)?;
        add(&group.patterns, &(&remaining & &matched), &|base| GroupSettings {
            // An explicit learning rate replaces that of the rule.
            lr_scale: group.scale(config.lr()) * if group.lr.is_some() { 1.0 } else { base.lr_scale },
            weight_decay: group.weight_decay.unwrap_or(base.weight_decay),
            late: 0,
        });
        remaining = &remaining - &matched;
    }
    let matched = matching(spec, "train.optimizer.no_decay", config.no_decay())?;
    let undecayed = |base| GroupSettings { weight_decay: 0.0, ..base };
    add(config.no_decay(), &(&remaining & &matched), &undecayed);
    add(&[], &(&remaining - &matched), &|base| base);
    Ok(groups)
}

/// The update settings of every parameter.
///
/// # Errors
/// Errors of [`param_groups`].
pub(crate) fn settings(config: &OptimizerConfig, spec: &ModelSpec) -> Result<Groups, TrainError> {
    let groups = param_groups(config, spec)?.into_iter();
    let uniform = Groups::uniform(config.weight_decay());
    Ok(groups.fold(uniform, |all, group| all.with(group.params, group.settings)))
}

/// Whether a pattern is a word for a kind of parameters, of which a model may have none: Llama has no biases. People
/// write `["norm", "bias"]` for every model.
fn names_kind(pattern: &str) -> bool {
    const KINDS: [&str; 5] = ["bias", "norm", "ln", "layernorm", "rmsnorm"];
    let letters: String = pattern.chars().filter(char::is_ascii_alphabetic).collect();
    KINDS.contains(&&*letters)
}

/// The parameters with a name or alias that matches one of the patterns of `key`.
///
/// # Errors
/// [`TrainError::Misfit`] for a pattern that matches nothing, unless it names a kind of parameters that do not decay.
pub(crate) fn matching(
    spec: &ModelSpec,
    key: &'static str,
    patterns: &[String],
) -> Result<BTreeSet<ParamId>, TrainError> {
    let names = |index: usize| {
        let param = &spec.params[index];
        std::iter::once(param.fqn.as_str()).chain(param.aliases.iter().map(String::as_str))
    };
    let compiled = FqnPatterns::new(patterns).expect("a resolved configuration has valid patterns");
    let all: Vec<&str> = (0..spec.params.len()).flat_map(names).collect();
    let is_kind = |pattern: &&str| key == "train.optimizer.no_decay" && names_kind(pattern);
    if let Some(pattern) = compiled.unused(&all).into_iter().find(|pattern| !is_kind(pattern)) {
        let example = all.first().copied().unwrap_or_default();
        let reason =
            format!("pattern `{pattern}` matches no parameter of the model; one of its names is `{example}`");
        return Err(TrainError::Misfit { key, reason });
    }
    Ok((0..spec.params.len())
        .filter(|&index| names(index).any(|name| compiled.matches(name)))
        .map(ParamId)
        .collect())
}
