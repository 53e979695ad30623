//! The disk space that a run needs, computed from its plan before it starts.

use fsdp_ckpt::native::{SavePlan, SaveSpace};
use fsdp_config::Resolved;
use fsdp_core::plan::Plan;

use super::table::StateTable;
use crate::error::TrainError;
use crate::rule;

/// Bytes that a run writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskNeed {
    /// Bytes of one checkpoint.
    pub save_bytes: u64,
    /// Largest number of checkpoints on disk at one time: the newest and the best ones that are kept, and the one being
    /// written.
    pub saves: u64,
    /// Bytes of the exported model or adapter, in the dtype of the run file or else of the master parameters.
    pub model_bytes: u64,
}

impl DiskNeed {
    /// Computes the need of a run from its plan.
    ///
    /// # Errors
    /// [`TrainError::Checkpoint`] for a model that the format cannot hold; those of the update rule.
    pub fn of(config: &Resolved, plan: &Plan) -> Result<Self, TrainError> {
        let rule = rule::rule(&config.train, &plan.spec)?;
        let table = StateTable::new(plan, &rule);
        let space = SaveSpace::new(&SavePlan::new(plan.mesh.shards(), table.tensors)?)?;
        let checkpoint = &config.checkpoint;
        // The last step is saved even if it is not due.
        let written = config.train.steps.checked_div(checkpoint.every).map_or(1, |saves| saves.max(1));
        let kept = if checkpoint.keep_last == 0 { written } else { checkpoint.keep_last as u64 };
        let dtype = config.run.export_dtype.unwrap_or(plan.policy.param_dtype.master());
        let exported = plan.spec.params.iter().filter(|param| config.adapter.is_none() || param.trainable);
        let elements: usize = exported.map(fsdp_core::model::ParamSpec::len).sum();
        Ok(Self {
            save_bytes: space.bytes(),
            saves: written.min(kept + checkpoint.keep_best as u64 + 1),
            model_bytes: (elements * dtype.size_bytes()) as u64,
        })
    }

    /// Largest number of bytes on disk at one time.
    pub fn at_most(&self) -> u64 {
        self.save_bytes.saturating_mul(self.saves).saturating_add(self.model_bytes)
    }
}
