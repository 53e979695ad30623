//! Describes the parameter groups of a run file.

use fsdp_config::OptimizerConfig;
use fsdp_core::model::ParamId;
use fsdp_train::{Job, ParamGroup, TrainError, param_groups};

use crate::run_setup::Model;
use crate::units::params;

/// A line for each group, with the parameters it trains; empty if the run file defines no groups and one rule updates
/// everything.
///
/// # Errors
/// [`TrainError::Misfit`] for a pattern that matches nothing.
pub(super) fn lines(job: &Job<Model>) -> Result<Vec<String>, TrainError> {
    let optimizer = &job.config.train.optimizer;
    if optimizer.groups().is_empty() && !matches!(optimizer, OptimizerConfig::Muon(_)) {
        return Ok(Vec::new());
    }
    let spec = &job.plan.spec;
    let line = |ParamGroup { patterns, rule, settings, params: ids }: ParamGroup| {
        let trained: Vec<ParamId> = ids.into_iter().filter(|&id| spec.param(id).trainable).collect();
        let elements = trained.iter().map(|&id| spec.param(id).len()).sum();
        let whose = if patterns.is_empty() { "all others".to_owned() } else { patterns.join(", ") };
        let by = rule.map_or_else(String::new, |rule| format!(" by {rule}"));
        let lr = match optimizer.lr() {
            Some(lr) => format!("lr {:e}", lr * settings.lr_scale),
            None => format!("lr x {}", settings.lr_scale),
        };
        let (count, decay) = (trained.len(), settings.weight_decay);
        format!(
            "group {whose}{by}: {count} tensors, {} parameters, {lr}, weight decay {decay}",
            params(elements)
        )
    };
    // Without `no_decay` its group is empty and not shown.
    let groups = param_groups(optimizer, spec)?.into_iter();
    let is_written = |group: &ParamGroup| match group.rule {
        Some(_) => !group.params.is_empty(),
        None => !group.patterns.is_empty() || !group.params.is_empty(),
    };
    Ok(groups.filter(is_written).map(line).collect())
}
