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
        Self { default: GroupSettings { lr_scale: 1.0, weight_decay }, by_param: BTreeMap::new() }
    }

    /// Overrides the settings of some parameters.
    #[must_use]
    pub fn with(mut self, params: impl IntoIterator<Item = ParamId>, settings: GroupSettings) -> Self {
        self.by_param.extend(params.into_iter().map(|param| (param, settings)));
        self
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
