//! From the configured optimizer to an update rule.

use std::collections::BTreeSet;

use fsdp_core::model::{ModelSpec, ParamId};
use fsdp_core::update::UpdateRule;
use fsdp_nn::Backend;
use fsdp_nn::update::{Adafactor, AdafactorOptions, AdamW, Sgd};

use crate::config::{FqnPatterns, OptimizerConfig};
use crate::error::TrainError;

/// A backend that has all update rules of the configuration.
pub trait TrainBackend: Backend {
    /// The update rule of a configuration.
    ///
    /// # Errors
    /// [`TrainError::Misfit`] for a `no_decay` pattern that matches nothing.
    fn rule(config: &OptimizerConfig, spec: &ModelSpec) -> Result<Box<dyn UpdateRule<Self>>, TrainError>;
}

impl<M: Backend> TrainBackend for M
where
    AdamW: UpdateRule<M>,
    Sgd: UpdateRule<M>,
    Adafactor: UpdateRule<M>,
{
    fn rule(config: &OptimizerConfig, spec: &ModelSpec) -> Result<Box<dyn UpdateRule<M>>, TrainError> {
        let no_decay = matching(spec, "train.optimizer.no_decay", config.no_decay())?;
        Ok(match config {
            OptimizerConfig::Adamw(c) => Box::new(AdamW {
                betas: (c.betas[0], c.betas[1]),
                eps: c.eps,
                weight_decay: c.weight_decay,
                no_decay,
            }),
            OptimizerConfig::Sgd(c) => Box::new(Sgd {
                momentum: c.momentum,
                dampening: c.dampening,
                weight_decay: c.weight_decay,
                nesterov: c.nesterov,
                no_decay,
            }),
            OptimizerConfig::Adafactor(c) => {
                let options = AdafactorOptions {
                    eps: (c.eps[0], c.eps[1]),
                    clip_threshold: c.clip_threshold,
                    decay_rate: c.decay_rate,
                    beta1: c.beta1,
                    weight_decay: c.weight_decay,
                    scale_parameter: c.scale_parameter,
                    relative_step: c.relative_step,
                    warmup_init: c.warmup_init,
                    no_decay,
                };
                Box::new(Adafactor::new(options, spec))
            }
        })
    }
}

/// The parameters whose name, or the name of a tied use, matches one of the patterns of `key`.
///
/// # Errors
/// [`TrainError::Misfit`] for a pattern that matches nothing.
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
    if let Some(pattern) = compiled.unused(&all).first() {
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
