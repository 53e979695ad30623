//! Per-parameter settings of an update rule; PyTorch's optimizers call them parameter groups.

use std::collections::BTreeMap;

use fsdp_core::model::ParamId;

/// The settings of a group of parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupSettings {
    /// Factor of a step's learning rate.
    pub lr_scale: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Steps of the run that were done before the first step of these parameters.
    pub late: u64,
}

impl GroupSettings {
    /// The settings of parameters that have none of their own.
    pub const PLAIN: Self = Self { lr_scale: 1.0, weight_decay: 0.0, late: 0 };

    /// Returns the number of a step of the run among the steps of these parameters, both counted from 1.
    pub fn own_step(&self, step: u64) -> u64 {
        step.saturating_sub(self.late)
    }
}

/// The settings of every parameter; the same on all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Groups {
    default: GroupSettings,
    by_param: BTreeMap<ParamId, GroupSettings>,
}

impl Groups {
    /// One group with all parameters.
    pub fn uniform(weight_decay: f64) -> Self {
        Self { default: GroupSettings { lr_scale: 1.0, weight_decay, late: 0 }, by_param: BTreeMap::new() }
    }

    /// Overrides the settings of some parameters.
    #[must_use]
    pub fn with(mut self, params: impl IntoIterator<Item = ParamId>, settings: GroupSettings) -> Self {
        self.by_param.extend(params.into_iter().map(|param| (param, settings)));
        self
    }

    /// Lets a parameter begin after `late` steps of the run.
    #[must_use]
    pub fn delayed(self, param: ParamId, late: u64) -> Self {
        let settings = GroupSettings { late, ..self.of(param) };
        self.with([param], settings)
    }

    /// Returns the settings of a parameter.
    pub fn of(&self, param: ParamId) -> GroupSettings {
        self.by_param.get(&param).copied().unwrap_or(self.default)
    }

    /// Whether all parameters have the same settings.
    pub fn is_uniform(&self) -> bool {
        self.by_param.values().all(|settings| *settings == self.default)
    }
}
