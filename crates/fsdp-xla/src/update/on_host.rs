//! Update rules outside of schedules.

use fsdp_core::Error;
use fsdp_core::memory::Slice;
use fsdp_core::update::{SegmentShard, StepScalars};
use fsdp_nn::{HostBuffer, HostMemory};

use crate::buffer::{Content, XlaBuffer};
use crate::memory::XlaMemory;

/// Applies a host rule to a shard.
pub(super) fn with_host_shard(
    memory: &XlaMemory,
    shard: &mut SegmentShard<'_, XlaBuffer>,
    scalars: &StepScalars<'_, XlaBuffer>,
    update: impl FnOnce(
        &HostMemory,
        &mut SegmentShard<'_, HostBuffer>,
        &StepScalars<'_, HostBuffer>,
    ) -> Result<(), Error>,
) -> Result<(), Error> {
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
    let result = update(memory.host(), &mut view, &scalars);
    let restore = |buffer: &XlaBuffer, host| buffer.storage.put(Content::Host(host));
    restore(shard.params, params);
    shard.low.as_deref().into_iter().zip(low).for_each(|(buffer, low)| restore(buffer, low));
    shard.state.iter().zip(state).for_each(|(buffer, state)| restore(buffer, state));
    restore(shard.not_finite, not_finite);
    result
}
