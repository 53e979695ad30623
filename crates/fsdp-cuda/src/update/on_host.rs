//! Updates by the host's rules.

use fsdp_core::Error;
use fsdp_core::memory::Slice;
use fsdp_core::update::{SegmentShard, StepScalars, UpdateRule};
use fsdp_nn::{HostBuffer, HostMemory};

use crate::device::{CudaBuffer, CudaMemory, put_back, readable, take};

/// Shows a shard in pinned memory to a rule of the host, once the compute queue's work so far is done.
pub(super) fn with_host_shard<R: UpdateRule<HostMemory>>(
    rule: &mut R,
    memory: &CudaMemory,
    shard: &mut SegmentShard<'_, CudaBuffer>,
    scalars: &StepScalars<'_, CudaBuffer>,
    run: impl FnOnce(
        &mut R,
        &HostMemory,
        &mut SegmentShard<'_, HostBuffer>,
        &StepScalars<'_, HostBuffer>,
    ) -> Result<(), Error>,
) -> Result<(), Error> {
    let gradient = readable(memory, shard.gradient)?;
    let factors = readable(memory, scalars.factors.buffer)?;
    let factors = Slice::new(&factors, scalars.factors.offset, scalars.factors.len);
    let mut params = take(memory, shard.params)?;
    let mut state =
        shard.state.iter_mut().map(|buffer| take(memory, buffer)).collect::<Result<Vec<_>, _>>()?;
    let result = {
        let pieces = shard.pieces;
        let mut view =
            SegmentShard { params: &mut params, low: None, gradient: &gradient, state: &mut state, pieces };
        let scalars = StepScalars { step: scalars.step, lr: scalars.lr, factors };
        run(rule, memory.mirror(), &mut view, &scalars)
    };
    let returned = put_back(memory, params, shard.params);
    let state = state.into_iter().zip(shard.state.iter_mut());
    state.map(|(buffer, to)| put_back(memory, buffer, to)).fold(result.and(returned), Result::and)?;
    shard.refresh(memory)
}
