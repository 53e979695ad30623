//! Update rules on a device.
//!
//! An element-wise rule is one kernel per run of elements with the same settings, made of its formula, and yields the
//! same bits as on the host; so does AdamW with 8-bit moments, with one kernel per piece. Adafactor is several kernels
//! per piece, whose sums have the host's order within a row and a fixed order beyond. All of these read on the device
//! whether the step was finite, so the host does not wait. Shards in pinned memory are updated by the host.

mod coded;
mod elementwise;
mod factored;
mod on_host;
mod runs;

use fsdp_core::Error;
use fsdp_core::update::{SegmentShard, Stage, StepScalars};
use fsdp_nn::backend::Outcome;
use fsdp_nn::update::Part;

#[cfg(test)]
pub(crate) use self::elementwise::{Kind, source};
#[cfg(feature = "torch")]
pub(crate) use self::runs::runs;
use crate::device::{CudaBuffer, CudaMemory};

impl CudaMemory {
    /// Runs a part of a rule.
    pub(crate) fn update_part(
        &self,
        part: &Part,
        stage: &mut Stage<'_, CudaBuffer>,
        shard: &mut SegmentShard<'_, CudaBuffer>,
        scalars: &StepScalars<'_, CudaBuffer>,
    ) -> Result<Outcome, Error> {
        match part {
            Part::Orthogonal(_) => return Ok(Outcome::Unsupported),
            _ if shard.params.is_on_host() => return self.update_on_host(part, stage, shard, scalars),
            Part::Elementwise(rule) => elementwise::update(self, &**rule, shard, scalars)?,
            Part::Coded(rule) => coded::update(self, rule, shard, scalars)?,
            Part::Factored(rule) => factored::run(self, rule, stage, shard, scalars)?,
        }
        Ok(Outcome::Done)
    }
}
