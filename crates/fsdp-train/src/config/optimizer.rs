//! `train.optimizer`: the update rules and their hyperparameters, with the defaults of `PyTorch` (`AdamW`,
//! SGD) and transformers (Adafactor).

use serde::Serialize;
use toml::Table;

use super::error::ConfigError;
use super::kind::{
    BETA, BETAS, BOOL, Kind, NON_NEGATIVE, NON_NEGATIVES, NON_POSITIVE, NUMBER, POSITIVE, write_or_none,
};
use super::patterns;
use super::reader::{Origin, Reader};

const PATH: &str = "train.optimizer";
const NAMES: Kind<&str> = Kind {
    allowed: "\"adamw\", \"sgd\" or \"adafactor\"",
    read: |value| ["adamw", "sgd", "adafactor"].into_iter().find(|&name| value.as_str() == Some(name)),
};

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

/// Hyperparameters of `torch.optim.AdamW`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AdamwConfig {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first and second moment.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Patterns (see [`FqnPatterns`](super::FqnPatterns)) of parameters that do not decay.
    pub no_decay: Vec<String>,
}

/// Hyperparameters of `torch.optim.SGD`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SgdConfig {
    /// Learning rate.
    pub lr: f64,
    /// Momentum; 0 keeps no state.
    pub momentum: f64,
    /// Weakens what enters the momentum.
    pub dampening: f64,
    /// Weight decay, added to the gradient.
    pub weight_decay: f64,
    /// Nesterov's momentum.
    pub nesterov: bool,
    /// Patterns (see [`FqnPatterns`](super::FqnPatterns)) of parameters that do not decay.
    pub no_decay: Vec<String>,
}

/// Hyperparameters of `transformers.Adafactor`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AdafactorConfig {
    /// Learning rate; none with `relative_step`, which derives it from the step.
    #[serde(serialize_with = "write_or_none")]
    pub lr: Option<f64>,
    /// Regularization of the squared gradient and of the parameter scale.
    pub eps: [f64; 2],
    /// Largest root mean square of an update.
    pub clip_threshold: f64,
    /// Exponent of the running averages of squares.
    pub decay_rate: f64,
    /// Decay of the first moment, if it is kept.
    #[serde(serialize_with = "write_or_none")]
    pub beta1: Option<f64>,
    /// Weight decay.
    pub weight_decay: f64,
    /// Scale the learning rate by the root mean square of the parameter.
    pub scale_parameter: bool,
    /// Derive the learning rate from the step.
    pub relative_step: bool,
    /// With `relative_step`: start small.
    pub warmup_init: bool,
    /// Patterns (see [`FqnPatterns`](super::FqnPatterns)) of parameters that do not decay.
    pub no_decay: Vec<String>,
}

impl OptimizerConfig {
    pub(super) fn read(origin: &Origin, train: &Reader<'_>) -> Result<OptimizerConfig, ConfigError> {
        let (name, table) = train.named_table("optimizer", NAMES, "adamw")?;
        Ok(match name {
            "adamw" => OptimizerConfig::Adamw(AdamwConfig::read(origin, table)?),
            "sgd" => OptimizerConfig::Sgd(SgdConfig::read(origin, table)?),
            _ => OptimizerConfig::Adafactor(AdafactorConfig::read(origin, table)?),
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

impl AdamwConfig {
    fn read(origin: &Origin, table: Table) -> Result<AdamwConfig, ConfigError> {
        let reader = Reader::open(origin, PATH, table, &["lr", "betas", "eps", "weight_decay", "no_decay"])?;
        Ok(AdamwConfig {
            lr: reader.or("lr", NON_NEGATIVE, 1e-3)?,
            betas: reader.or("betas", BETAS, [0.9, 0.999])?,
            eps: reader.or("eps", NON_NEGATIVE, 1e-8)?,
            weight_decay: reader.or("weight_decay", NON_NEGATIVE, 1e-2)?,
            no_decay: patterns::read(&reader, "no_decay")?,
        })
    }
}

impl SgdConfig {
    fn read(origin: &Origin, table: Table) -> Result<SgdConfig, ConfigError> {
        let keys = &["lr", "momentum", "dampening", "weight_decay", "nesterov", "no_decay"];
        let reader = Reader::open(origin, PATH, table, keys)?;
        let sgd = SgdConfig {
            lr: reader.or("lr", NON_NEGATIVE, 1e-3)?,
            momentum: reader.or("momentum", NON_NEGATIVE, 0.0)?,
            dampening: reader.or("dampening", NUMBER, 0.0)?,
            weight_decay: reader.or("weight_decay", NON_NEGATIVE, 0.0)?,
            nesterov: reader.or("nesterov", BOOL, false)?,
            no_decay: patterns::read(&reader, "no_decay")?,
        };
        if sgd.nesterov && (sgd.momentum <= 0.0 || sgd.dampening != 0.0) {
            return Err(reader.rejected("nesterov", "false, unless momentum is above 0 and dampening is 0"));
        }
        Ok(sgd)
    }
}

impl AdafactorConfig {
    fn read(origin: &Origin, table: Table) -> Result<AdafactorConfig, ConfigError> {
        let keys = &[
            "lr",
            "eps",
            "clip_threshold",
            "decay_rate",
            "beta1",
            "weight_decay",
            "scale_parameter",
            "relative_step",
            "warmup_init",
            "no_decay",
        ];
        let reader = Reader::open(origin, PATH, table, keys)?;
        let adafactor = AdafactorConfig {
            lr: reader.or_none("lr", NON_NEGATIVE)?,
            eps: reader.or("eps", NON_NEGATIVES, [1e-30, 1e-3])?,
            clip_threshold: reader.or("clip_threshold", POSITIVE, 1.0)?,
            decay_rate: reader.or("decay_rate", NON_POSITIVE, -0.8)?,
            beta1: reader.or_none("beta1", BETA)?,
            weight_decay: reader.or("weight_decay", NON_NEGATIVE, 0.0)?,
            scale_parameter: reader.or("scale_parameter", BOOL, true)?,
            relative_step: reader.or("relative_step", BOOL, true)?,
            warmup_init: reader.or("warmup_init", BOOL, false)?,
            no_decay: patterns::read(&reader, "no_decay")?,
        };
        adafactor.check(&reader)?;
        Ok(adafactor)
    }

    /// The rules of transformers between `lr`, `relative_step` and `warmup_init`.
    fn check(&self, reader: &Reader<'_>) -> Result<(), ConfigError> {
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
        Ok(())
    }
}
