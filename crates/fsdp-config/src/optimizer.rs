//! `train.optimizer`: the update rules and their hyperparameters, with the defaults of `PyTorch` (`AdamW`,
//! SGD, Muon), transformers (Adafactor) and the authors (Lion, schedule-free `AdamW`).

use fsdp_nn::update::AdjustLr;
use serde::Serialize;

use super::describe::{self, TableSchema};
use super::error::ConfigError;
use super::group::{GROUPS, GroupConfig, group_patterns};
use super::kind::{BETA, BETAS, BOOL, COUNT, NON_NEGATIVE, NON_NEGATIVES, NON_POSITIVE, NUMBER, POSITIVE};
use super::named::named;
use super::reader::Reader;
use super::table::table;
use super::writer;

/// An update rule.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "name", rename_all = "lowercase")]
pub enum OptimizerConfig {
    /// `torch.optim.AdamW`.
    Adamw(AdamwConfig),
    /// `AdamW` with 8-bit moments, as in bitsandbytes.
    Adamw8bit(AdamwConfig),
    /// `torch.optim.SGD`.
    Sgd(SgdConfig),
    /// `transformers.Adafactor`.
    Adafactor(AdafactorConfig),
    /// Lion (Chen et al. 2023).
    Lion(LionConfig),
    /// `torch.optim.Muon` for hidden matrices, and `torch.optim.AdamW` for all other parameters.
    Muon(MuonConfig),
    /// Schedule-free `AdamW` (Defazio et al. 2024).
    #[serde(rename = "schedule_free_adamw")]
    ScheduleFree(ScheduleFreeConfig),
}

named! {
    AdjustLr { "original": Original, "match_rms_adamw": MatchRmsAdamw }
}

table! {
    /// Hyperparameters of `torch.optim.AdamW`.
    pub struct AdamwConfig {
        /// Learning rate.
        lr: f64 = or(NON_NEGATIVE, 1e-3),
        /// Decay of the first and second moment.
        betas: [f64; 2] = or(BETAS, [0.9, 0.999]),
        /// Added to the square root of the second moment.
        eps: f64 = or(NON_NEGATIVE, 1e-8),
        /// Decoupled weight decay.
        weight_decay: f64 = or(NON_NEGATIVE, 1e-2),
        /// Regular expressions, found anywhere in a name, of parameters without weight decay.
        no_decay: Vec<String> = patterns(),
        /// Parameter groups with their own settings.
        group: Vec<GroupConfig> = tables(GROUPS, GroupConfig::read_checked),
    }
}

table! {
    /// Hyperparameters of `torch.optim.SGD`.
    pub struct SgdConfig {
        /// Learning rate.
        lr: f64 = or(NON_NEGATIVE, 1e-3),
        /// Momentum; 0 keeps no state.
        momentum: f64 = or(NON_NEGATIVE, 0.0),
        /// Dampening of the gradient that enters the momentum.
        dampening: f64 = or(NUMBER, 0.0),
        /// Weight decay, added to the gradient.
        weight_decay: f64 = or(NON_NEGATIVE, 0.0),
        /// Whether to use Nesterov momentum.
        nesterov: bool = or(BOOL, false),
        /// Regular expressions, found anywhere in a name, of parameters without weight decay.
        no_decay: Vec<String> = patterns(),
        /// Parameter groups with their own settings.
        group: Vec<GroupConfig> = tables(GROUPS, GroupConfig::read_checked),
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
        /// Whether to scale the learning rate by the root mean square of the parameter.
        scale_parameter: bool = or(BOOL, true),
        /// Whether to derive the learning rate from the step number.
        relative_step: bool = or(BOOL, true),
        /// With `relative_step`: whether to start with a small learning rate.
        warmup_init: bool = or(BOOL, false),
        /// Regular expressions, found anywhere in a name, of parameters without weight decay.
        no_decay: Vec<String> = patterns(),
        /// Parameter groups with their own settings.
        group: Vec<GroupConfig> = tables(GROUPS, GroupConfig::read_checked),
    }
}

table! {
    /// Hyperparameters of Lion, with the defaults of its authors.
    pub struct LionConfig {
        /// Learning rate.
        lr: f64 = or(NON_NEGATIVE, 1e-4),
        /// Decay of the average of gradients: for the direction of a step, and for the state.
        betas: [f64; 2] = or(BETAS, [0.9, 0.99]),
        /// Decoupled weight decay.
        weight_decay: f64 = or(NON_NEGATIVE, 0.0),
        /// Regular expressions, found anywhere in a name, of parameters without weight decay.
        no_decay: Vec<String> = patterns(),
        /// Parameter groups with their own settings.
        group: Vec<GroupConfig> = tables(GROUPS, GroupConfig::read_checked),
    }
}

table! {
    /// Hyperparameters of `torch.optim.Muon`, and of AdamW for the other parameters.
    pub struct MuonConfig {
        /// Learning rate of matrices.
        lr: f64 = or(POSITIVE, 1e-3),
        /// Momentum.
        momentum: f64 = or(BETA, 0.95),
        /// Whether to use Nesterov momentum.
        nesterov: bool = or(BOOL, true),
        /// Smallest norm that a direction is divided by.
        eps: f64 = or(POSITIVE, 1e-7),
        /// How the learning rate depends on the shape of a matrix.
        adjust_lr_fn: AdjustLr = named(AdjustLr::Original),
        /// Decoupled weight decay of matrices.
        weight_decay: f64 = or(NON_NEGATIVE, 0.1),
        /// Regular expressions, found anywhere in a name, of hidden matrices to be updated by AdamW.
        adamw_params: Vec<String> = patterns(),
        /// Learning rate of AdamW, scaled by the schedule like `lr`.
        adamw_lr: f64 = or(NON_NEGATIVE, 1e-3),
        /// Decay of AdamW's first and second moment.
        adamw_betas: [f64; 2] = or(BETAS, [0.9, 0.999]),
        /// Added to the square root of AdamW's second moment.
        adamw_eps: f64 = or(NON_NEGATIVE, 1e-8),
        /// Decoupled weight decay of AdamW.
        adamw_weight_decay: f64 = or(NON_NEGATIVE, 1e-2),
        /// Regular expressions, found anywhere in a name, of parameters without weight decay.
        no_decay: Vec<String> = patterns(),
        /// Parameter groups with their own settings.
        group: Vec<GroupConfig> = tables(GROUPS, GroupConfig::read_checked),
    }
}

table! {
    /// Hyperparameters of schedule-free `AdamW`, with the defaults of its authors.
    pub struct ScheduleFreeConfig {
        /// Learning rate.
        lr: f64 = or(NON_NEGATIVE, 2.5e-3),
        /// Share of the average in the parameters that gradients are taken at, and decay of the second moment.
        betas: [f64; 2] = or(BETAS, [0.9, 0.999]),
        /// Added to the square root of the second moment.
        eps: f64 = or(NON_NEGATIVE, 1e-8),
        /// Weight decay, scaled by the learning rate.
        weight_decay: f64 = or(NON_NEGATIVE, 0.0),
        /// Steps in which the learning rate rises from 0 to `lr`.
        warmup_steps: u64 = or(COUNT, 0),
        /// Regular expressions, found anywhere in a name, of parameters without weight decay.
        no_decay: Vec<String> = patterns(),
        /// Parameter groups with their own settings.
        group: Vec<GroupConfig> = tables(GROUPS, GroupConfig::read_checked),
    }
}

/// An update rule: its name, a function that reads its settings, and a function that returns their schema.
pub(super) type Rule =
    (&'static str, fn(&Reader<'_>) -> Result<OptimizerConfig, ConfigError>, fn() -> serde_json::Value);

/// All update rules, the default first.
pub(super) const RULES: [Rule; 7] = [
    ("adamw", |reader| AdamwConfig::read(reader).map(OptimizerConfig::Adamw), AdamwConfig::schema),
    ("adamw8bit", |reader| AdamwConfig::read(reader).map(OptimizerConfig::Adamw8bit), AdamwConfig::schema),
    ("sgd", |reader| SgdConfig::read(reader)?.checked(reader).map(OptimizerConfig::Sgd), SgdConfig::schema),
    (
        "adafactor",
        |reader| AdafactorConfig::read(reader)?.checked(reader).map(OptimizerConfig::Adafactor),
        AdafactorConfig::schema,
    ),
    ("lion", |reader| LionConfig::read(reader).map(OptimizerConfig::Lion), LionConfig::schema),
    ("muon", |reader| MuonConfig::read(reader).map(OptimizerConfig::Muon), MuonConfig::schema),
    (
        "schedule_free_adamw",
        |reader| ScheduleFreeConfig::read(reader).map(OptimizerConfig::ScheduleFree),
        ScheduleFreeConfig::schema,
    ),
];

impl TableSchema for OptimizerConfig {
    fn schema() -> serde_json::Value {
        describe::by_name(RULES.map(|(name, _, schema)| (name, schema())))
    }
}

/// Evaluates an expression with the settings of the optimizer, whichever it is.
macro_rules! chosen {
    ($optimizer:expr, $settings:ident => $value:expr) => {
        match $optimizer {
            OptimizerConfig::Adamw($settings) | OptimizerConfig::Adamw8bit($settings) => $value,
            OptimizerConfig::Sgd($settings) => $value,
            OptimizerConfig::Adafactor($settings) => $value,
            OptimizerConfig::Lion($settings) => $value,
            OptimizerConfig::Muon($settings) => $value,
            OptimizerConfig::ScheduleFree($settings) => $value,
        }
    };
}

impl OptimizerConfig {
    /// An optimizer without state, for a model that is not trained.
    pub fn none() -> Self {
        OptimizerConfig::Sgd(SgdConfig {
            lr: 0.0,
            momentum: 0.0,
            dampening: 0.0,
            weight_decay: 0.0,
            nesterov: false,
            no_decay: Vec::new(),
            group: Vec::new(),
        })
    }

    /// The name in run files.
    pub(super) fn name(&self) -> &'static str {
        match self {
            OptimizerConfig::Adamw(_) => "adamw",
            OptimizerConfig::Adamw8bit(_) => "adamw8bit",
            OptimizerConfig::Sgd(_) => "sgd",
            OptimizerConfig::Adafactor(_) => "adafactor",
            OptimizerConfig::Lion(_) => "lion",
            OptimizerConfig::Muon(_) => "muon",
            OptimizerConfig::ScheduleFree(_) => "schedule_free_adamw",
        }
    }

    pub(super) fn read(reader: &Reader<'_>) -> Result<OptimizerConfig, ConfigError> {
        let (name, reader) = reader.split_name(&RULES.map(|(name, ..)| name))?;
        let rule = RULES.iter().find(|(known, ..)| *known == name);
        let optimizer = rule.expect("the name is one of these").1(&reader)?;
        let has_lr = optimizer.groups().iter().any(|group| group.lr.is_some());
        if has_lr && optimizer.lr().is_none_or(|lr| lr == 0.0) {
            let allowed = "without lr: it is scaled with the lr of the optimizer, which must be above 0";
            return Err(reader.rejected("group", allowed));
        }
        Ok(optimizer)
    }

    /// The learning rate that a schedule multiplies; `None` if Adafactor derives its own.
    pub fn lr(&self) -> Option<f64> {
        match self {
            OptimizerConfig::Adamw(adamw) | OptimizerConfig::Adamw8bit(adamw) => Some(adamw.lr),
            OptimizerConfig::Sgd(sgd) => Some(sgd.lr),
            OptimizerConfig::Adafactor(adafactor) => adafactor.lr,
            OptimizerConfig::Lion(lion) => Some(lion.lr),
            OptimizerConfig::Muon(muon) => Some(muon.lr),
            OptimizerConfig::ScheduleFree(free) => Some(free.lr),
        }
    }

    /// Weight decay of parameters in no group; with Muon, only of matrices.
    pub fn weight_decay(&self) -> f64 {
        chosen!(self, settings => settings.weight_decay)
    }

    /// Patterns of parameters that do not decay.
    pub fn no_decay(&self) -> &[String] {
        chosen!(self, settings => &settings.no_decay)
    }

    /// Parameter groups with their own settings.
    pub fn groups(&self) -> &[GroupConfig] {
        chosen!(self, settings => &settings.group)
    }

    /// Every list of parameter patterns, with its dotted key.
    pub fn patterns_mut(&mut self) -> Vec<(String, &mut Vec<String>)> {
        let mut all = Vec::new();
        if let OptimizerConfig::Muon(muon) = self {
            all.push(("train.optimizer.adamw_params".to_owned(), &mut muon.adamw_params));
            all.push(("train.optimizer.no_decay".to_owned(), &mut muon.no_decay));
            all.extend(group_patterns(&mut muon.group));
            return all;
        }
        let (no_decay, groups) = chosen!(self, settings => (&mut settings.no_decay, &mut settings.group));
        all.extend(group_patterns(groups));
        all.push(("train.optimizer.no_decay".to_owned(), no_decay));
        all
    }
}

impl SgdConfig {
    /// Checks `PyTorch`'s rule for `nesterov`, `momentum` and `dampening`.
    fn checked(self, reader: &Reader<'_>) -> Result<SgdConfig, ConfigError> {
        if self.nesterov && (self.momentum <= 0.0 || self.dampening != 0.0) {
            return Err(reader.rejected("nesterov", "false, unless momentum is above 0 and dampening is 0"));
        }
        Ok(self)
    }
}

impl AdafactorConfig {
    /// Checks the rules of transformers for `lr`, `relative_step` and `warmup_init`.
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
