//! Update rules: within a schedule, one pass over whole shards, the same on every rank; outside of it, those of the
//! host.
//!
//! Ranks hold different parameters, whose learning rates and weight decay may differ. If they do, a rank looks up its
//! rows in a table, which is an argument. Adafactor has more tables, for the placement of its state: its lengths differ
//! between ranks, and programs use the largest.

mod by_param;
mod direction;
mod elementwise;
mod factored;
mod on_host;
mod places;

use fsdp_core::Error;
use fsdp_core::update::{SegmentShard, Stage, StepScalars};
use fsdp_nn::backend::Outcome;
use fsdp_nn::update::Part;

use self::factored::Pass;
use crate::buffer::XlaBuffer;
use crate::memory::XlaMemory;
use crate::trace::Trace;

impl XlaMemory {
    /// Runs a part of a rule, or records it while a schedule is traced.
    pub(crate) fn update_part(
        &self,
        part: &Part,
        stage: &mut Stage<'_, XlaBuffer>,
        shard: &mut SegmentShard<'_, XlaBuffer>,
        scalars: &StepScalars<'_, XlaBuffer>,
    ) -> Result<Outcome, Error> {
        if matches!(part, Part::Coded(_) | Part::Orthogonal(_)) {
            return Ok(Outcome::Unsupported);
        }
        if !self.is_tracing() {
            return self.update_on_host(part, stage, shard, scalars);
        }
        if let Some(trace) = &mut *self.lock() {
            trace.update(part, stage, shard, scalars);
        }
        match (part, stage) {
            (Part::Elementwise(rule), _) if !rule.changes_params() => {}
            (_, Stage::Update { .. }) => shard.refresh(self)?,
            (_, Stage::Statistics { .. } | Stage::Direct { .. }) => {}
        }
        Ok(Outcome::Done)
    }
}

impl Trace {
    fn update(
        &mut self,
        part: &Part,
        stage: &mut Stage<'_, XlaBuffer>,
        shard: &mut SegmentShard<'_, XlaBuffer>,
        scalars: &StepScalars<'_, XlaBuffer>,
    ) {
        match (part, stage) {
            (Part::Elementwise(rule), _) => self.elementwise(&**rule, shard, scalars),
            (Part::Factored(rule), stage) => {
                let pass = Pass::new(rule, self, shard, scalars);
                match stage {
                    Stage::Statistics { earlier: [], sums } => pass.moments(sums),
                    Stage::Statistics { earlier: [moments, ..], sums } => pass.norms(moments, sums),
                    Stage::Update { statistics: [moments, norms] } => pass.update(moments, norms),
                    Stage::Update { .. } | Stage::Direct { .. } => {
                        panic!("a stage that a factored rule did not declare")
                    }
                }
            }
            (Part::Coded(_) | Part::Orthogonal(_), _) => unreachable!("they are refused"),
        }
    }
}
