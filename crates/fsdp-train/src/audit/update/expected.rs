//! What a step should have done to each group of parameters.

use std::collections::BTreeMap;

use fsdp_config::OptimizerConfig;
use fsdp_core::model::ParamId;
use fsdp_nn::update::GroupSettings;

use crate::audit::report::Finding;

/// Name of the second moment.
pub(in crate::audit) const SECOND: &str = "exp_avg_sq";

/// Name of the largest second moment, which AMSGrad keeps.
pub(super) const LARGEST: &str = "max_exp_avg_sq";

/// Parameters with the same settings.
pub(super) struct Group {
    pub(super) params: Vec<ParamId>,
    pub(super) settings: GroupSettings,
}

/// What the step should have done.
pub(in crate::audit) struct Expected<'a> {
    pub(in crate::audit) optimizer: &'a OptimizerConfig,
    /// Learning rate of the step, before factors of groups.
    pub(in crate::audit) lr: f64,
    /// Settings of each trained parameter.
    pub(in crate::audit) settings: BTreeMap<ParamId, GroupSettings>,
    /// Number of the step among the steps of each parameter, from 1.
    pub(in crate::audit) own_steps: BTreeMap<ParamId, u64>,
    /// What the judgement of the gradient has found.
    pub(in crate::audit) found: &'a [Finding],
}
