//! `train.optimizer`: the update rules and their hyperparameters, with the defaults of `PyTorch` (`AdamW`,
//! SGD) and transformers (Adafactor).

use serde::Serialize;

use super::error::ConfigError;
use super::kind::{BETA, BETAS, BOOL, NON_NEGATIVE, NON_NEGATIVES, NON_POSITIVE, NUMBER, POSITIVE};
use super::reader::Reader;
use super::table::table;
use super::written;

/// An update rule.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "name", rename_all = "lowercase")]
pub enum OptimizerConfig {
    /// `torch.optim.AdamW`.
    Adamw(AdamwConfig),
    /// `torch.optim.SGD`.
    Sgd(SgdConfig),
    /// `transformers.Adafactor`.
    Adafactor(AdafactorConfig),
}

table! {
    /// Hyperparameters of `torch.optim.AdamW`.
    pub struct AdamwConfig {
        /// Learning rate.
        lr: f64 = or(NON_NEGATIVE, 1e-3),
        /// Decay of the first and second moment.
        betas: [f64; 2] = or(BETAS, [0.9, 0.999]),
        /// Added to the root of the second moment.
        eps: f64 = or(NON_NEGATIVE, 1e-8),
        /// Decoupled weight decay.
        weight_decay: f64 = or(NON_NEGATIVE, 1e-2),
        /// Patterns (see [`FqnPatterns`](super::FqnPatterns)) of parameters that do not decay.
        no_decay: Vec<String> = patterns(),
    }
}

table! {
    /// Hyperparameters of `torch.optim.SGD`.
    pub struct SgdConfig {
        /// Learning rate.
        lr: f64 = or(NON_NEGATIVE, 1e-3),
        /// Momentum; 0 keeps no state.
        momentum: f64 = or(NON_NEGATIVE, 0.0),
        /// Weakens what enters the momentum.
        dampening: f64 = or(NUMBER, 0.0),
        /// Weight decay, added to the gradient.
        weight_decay: f64 = or(NON_NEGATIVE, 0.0),
        /// Nesterov's momentum.
        nesterov: bool = or(BOOL, false),
        /// Patterns (see [`FqnPatterns`](super::FqnPatterns)) of parameters that do not decay.
        no_decay: Vec<String> = patterns(),
    }
}

table! {
    /// Hyperparameters of `transformers.Adafactor`.
    pub struct AdafactorConfig {
        /// Learning rate; none with `relative_step`, which derives it from the step.
        lr: Option<f64> = or_none(NON_NEGATIVE),
        /// Regularization of the squared gradient and of the parameter scale.
        eps: [f64; 2] = or(NON_NEGATIVES, [1e-30, 1e-3]),
        /// Largest root mean square of an update.
        clip_threshold: f64 = or(POSITIVE, 1.0),
        /// Exponent of the running averages of squares.
        decay_rate: f64 = or(NON_POSITIVE, -0.8),
        /// Decay of the first moment, if it is kept.
        beta1: Option<f64> = or_none(BETA),
        /// Weight decay.
        weight_decay: f64 = or(NON_NEGATIVE, 0.0),
        /// Scale the learning rate by the root mean square of the parameter.
        scale_parameter: bool = or(BOOL, true),
        /// Derive the learning rate from the step.
        relative_step: bool = or(BOOL, true),
        /// With `relative_step`: start small.
        warmup_init: bool = or(BOOL, false),
        /// Patterns (see [`FqnPatterns`](super::FqnPatterns)) of parameters that do not decay.
        no_decay: Vec<String> = patterns(),
    }
}

impl OptimizerConfig {
    pub(super) fn read(reader: &Reader<'_>) -> Result<OptimizerConfig, ConfigError> {
        let (name, reader) = reader.split_name(&["adamw", "sgd", "adafactor"])?;
        Ok(match name {
            "adamw" => OptimizerConfig::Adamw(AdamwConfig::read(&reader)?),
            "sgd" => OptimizerConfig::Sgd(SgdConfig::read(&reader)?.checked(&reader)?),
            _ => OptimizerConfig::Adafactor(AdafactorConfig::read(&reader)?.checked(&reader)?),
        })
    }

    /// The learning rate that a schedule multiplies; `None` where Adafactor derives its own.
    pub fn lr(&self) -> Option<f64> {
        match self {
            OptimizerConfig::Adamw(adamw) => Some(adamw.lr),
            OptimizerConfig::Sgd(sgd) => Some(sgd.lr),
            OptimizerConfig::Adafactor(adafactor) => adafactor.lr,
        }
    }

    /// Patterns of parameters that do not decay.
    pub fn no_decay(&self) -> &[String] {
        match self {
            OptimizerConfig::Adamw(adamw) => &adamw.no_decay,
            OptimizerConfig::Sgd(sgd) => &sgd.no_decay,
            OptimizerConfig::Adafactor(adafactor) => &adafactor.no_decay,
        }
    }
}

impl SgdConfig {
    /// The rule of `PyTorch` between `nesterov`, `momentum` and `dampening`.
    fn checked(self, reader: &Reader<'_>) -> Result<SgdConfig, ConfigError> {
        if self.nesterov && (self.momentum <= 0.0 || self.dampening != 0.0) {
            return Err(reader.rejected("nesterov", "false, unless momentum is above 0 and dampening is 0"));
        }
        Ok(self)
    }
}

impl AdafactorConfig {
    /// The rules of transformers between `lr`, `relative_step` and `warmup_init`.
    fn checked(self, reader: &Reader<'_>) -> Result<AdafactorConfig, ConfigError> {
        if self.relative_step && self.lr.is_some() {
            let remedy = "remove lr, or set relative_step = false (it is true by default)";
            return Err(reader.conflict("relative_step", "lr", remedy));
        }
        if !self.relative_step {
            reader.required("lr", NON_NEGATIVE)?;
        }
        if self.warmup_init && !self.relative_step {
            return Err(reader.rejected("warmup_init", "false, unless relative_step is true"));
        }
        Ok(self)
    }
}
