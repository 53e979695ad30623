//! Update rules over [`Torch`]: those of the underlying memory, or element-wise ones composed of ATen's operations.
//!
//! A composition makes one pass over memory for every addition, product, quotient and root. Each is rounded separately,
//! in the order of the formula, so the results have the same bits.

mod elementwise;

use fsdp_core::memory::Buffer;
use fsdp_core::update::{SegmentShard, Stage, StepScalars};
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::backend::Outcome;
use fsdp_nn::update::{Calculation, ElementwiseRule, Part};

use super::memory::Torch;
use super::storage::TorchStorage;

impl<D: TorchStorage> Torch<D> {
    /// Runs a part of a rule.
    pub(super) fn update_part(
        &self,
        part: &Part,
        stage: &mut Stage<'_, D::Buffer>,
        shard: &mut SegmentShard<'_, D::Buffer>,
        scalars: &StepScalars<'_, D::Buffer>,
    ) -> Result<Outcome, Error> {
        match part {
            Part::Elementwise(rule) if self.composes(&**rule, shard) => {
                self.in_torch(Queue::Compute, "update", || {
                    elementwise::update(self, &**rule, shard, scalars)
                })?;
                if rule.changes_params() {
                    shard.refresh(self)?;
                }
                Ok(Outcome::Done)
            }
            Part::Elementwise(_) | Part::Coded(_) | Part::Factored(_) | Part::Orthogonal(_) => {
                self.storage().update(part, stage, shard, scalars)
            }
        }
    }

    /// Whether libtorch runs the rule. Its square roots on CPUs are occasionally off by a unit in the last place; those in
    /// single precision can be rounded correctly, others are left to our kernels.
    fn composes(&self, rule: &dyn ElementwiseRule, shard: &SegmentShard<'_, D::Buffer>) -> bool {
        let is_root = |calculation: &Calculation<_>| matches!(calculation, Calculation::SquareRoot(_));
        let has_root = || rule.formula().0.calculations.iter().any(is_root);
        self.must_compose(&[shard.params]) && (shard.params.dtype() == DType::F32 || !has_root())
    }
}
