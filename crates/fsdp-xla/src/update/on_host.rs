//! Update rules outside of schedules.

use fsdp_core::Error;
use fsdp_core::memory::Slice;
use fsdp_core::update::{SegmentShard, Stage, StepScalars};
use fsdp_nn::HostBuffer;
use fsdp_nn::backend::{Backend, Outcome};
use fsdp_nn::update::Part;

use crate::buffer::{Content, XlaBuffer};
use crate::memory::XlaMemory;

impl XlaMemory {
    /// Applies the host's part of a rule to a shard.
    pub(super) fn update_on_host(
        &self,
        part: &Part,
        stage: &mut Stage<'_, XlaBuffer>,
        shard: &mut SegmentShard<'_, XlaBuffer>,
        scalars: &StepScalars<'_, XlaBuffer>,
    ) -> Result<Outcome, Error> {
        match stage {
            Stage::Statistics { earlier, sums } => {
                let earlier = self.on_host_all(earlier)?;
                let mut found = self.take_to_host(sums)?;
                let stage = Stage::Statistics { earlier: &earlier, sums: &mut found };
                let result = with_host_shard(self, part, stage, shard, scalars);
                sums.storage.put(Content::Host(found));
                result
            }
            Stage::Update { statistics } => {
                let statistics = self.on_host_all(statistics)?;
                with_host_shard(self, part, Stage::Update { statistics: &statistics }, shard, scalars)
            }
            Stage::Direct { .. } => Ok(Outcome::Unsupported),
        }
    }

    /// Host copies of sums.
    fn on_host_all(&self, sums: &[XlaBuffer]) -> Result<Vec<HostBuffer>, Error> {
        sums.iter().map(|sums| self.on_host(sums)).collect()
    }
}

fn with_host_shard(
    memory: &XlaMemory,
    part: &Part,
    mut stage: Stage<'_, HostBuffer>,
    shard: &mut SegmentShard<'_, XlaBuffer>,
    scalars: &StepScalars<'_, XlaBuffer>,
) -> Result<Outcome, Error> {
    let (gradient, factors) = (memory.on_host(shard.gradient)?, memory.on_host(scalars.factors.buffer)?);
    let factors = Slice::new(&factors, scalars.factors.offset, scalars.factors.len);
    let mut params = memory.take_to_host(shard.params)?;
    let mut low = shard.low.as_deref().map(|low| memory.take_to_host(low)).transpose()?;
    let mut state =
        shard.state.iter().map(|buffer| memory.take_to_host(buffer)).collect::<Result<Vec<_>, _>>()?;
    let mut not_finite = memory.take_to_host(shard.not_finite)?;
    let mut view = SegmentShard {
        params: &mut params,
        low: low.as_mut(),
        gradient: &gradient,
        state: &mut state,
        pieces: shard.pieces,
        segment: shard.segment,
        // Rules that need directions are not available here.
        whole: None,
        not_finite: &mut not_finite,
    };
    let scalars = StepScalars { step: scalars.step, lr: scalars.lr, factors };
    let result = memory.host().update(part, &mut stage, &mut view, &scalars);
    let restore = |buffer: &XlaBuffer, host| buffer.storage.put(Content::Host(host));
    restore(shard.params, params);
    shard.low.as_deref().into_iter().zip(low).for_each(|(buffer, low)| restore(buffer, low));
    shard.state.iter().zip(state).for_each(|(buffer, state)| restore(buffer, state));
    restore(shard.not_finite, not_finite);
    result
}
