//! How the host runs update rules: fused passes over the shard of a segment.

mod coded;
mod factored;
mod finite_check;
mod momentum;
mod orthogonal;
mod orthogonalized;
mod pass;

use fsdp_core::memory::Buffer;
use fsdp_core::update::{SegmentShard, Stage, StepScalars};
use fsdp_core::{DType, Error};

pub(super) use self::orthogonal::Shape;
#[cfg(test)]
pub(super) use self::orthogonal::orthogonalize;
pub use self::pass::HostScalars;
pub(super) use self::pass::each_block;
use super::Part;
use crate::host::{HostBuffer, HostMemory};

/// Runs a function for the type of the parameters.
macro_rules! for_master {
    ($shard:ident, $rule:ident.$method:ident($($arg:expr),*)) => {
        match $shard.params.dtype() {
            DType::F64 => $rule.$method::<f64>($($arg),*)?,
            _ => $rule.$method::<f32>($($arg),*)?,
        }
    };
}

impl HostMemory {
    /// Runs a part of a rule.
    ///
    /// # Errors
    /// Those of the memory.
    pub(crate) fn update_part(
        &self,
        part: &Part,
        stage: &mut Stage<'_, HostBuffer>,
        shard: &mut SegmentShard<'_, HostBuffer>,
        scalars: &StepScalars<'_, HostBuffer>,
    ) -> Result<(), Error> {
        let Some(scalars) = &HostScalars::read(self, scalars)? else { return Ok(()) };
        match (part, &mut *stage) {
            (Part::Elementwise(rule), Stage::Update { .. }) => rule.update_on_host(self, shard, scalars)?,
            (Part::Coded(rule), Stage::Update { .. }) => for_master!(shard, rule.typed(self, shard, scalars)),
            (Part::Factored(rule), stage) => {
                let stage = factored::Stage::of(self, stage)?;
                for_master!(shard, rule.typed(self, shard, scalars, stage));
            }
            (Part::Orthogonal(rule), Stage::Direct { direction }) => {
                for_master!(shard, rule.momentum(self, shard, scalars, direction));
            }
            (Part::Orthogonal(rule), Stage::Update { .. }) => {
                for_master!(shard, rule.typed(self, shard, scalars));
            }
            (_, stage) => panic!("{stage:?}: a stage that the rule did not declare"),
        }
        match (part, stage) {
            (Part::Elementwise(rule), _) if !rule.changes_params() => Ok(()),
            (_, Stage::Update { .. }) => shard.refresh(self),
            (_, Stage::Statistics { .. } | Stage::Direct { .. }) => Ok(()),
        }
    }
}
