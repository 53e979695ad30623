//! Updates on the host, by the host's rules.

use fsdp_core::memory::{Category, HostSliceMut, Memory, Slice, SliceMut};
use fsdp_core::update::{SegmentShard, StepScalars};
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::{HostBuffer, HostMemory};

use crate::device::{CudaBuffer, CudaMemory, put_back, readable, take};

/// Runs a rule of the host on a shard in pinned memory, after all earlier work on the compute queue.
pub(super) fn with_host_shard(
    memory: &CudaMemory,
    shard: &mut SegmentShard<'_, CudaBuffer>,
    scalars: &StepScalars<'_, CudaBuffer>,
    run: impl FnOnce(
        &HostMemory,
        &mut SegmentShard<'_, HostBuffer>,
        &StepScalars<'_, HostBuffer>,
    ) -> Result<(), Error>,
) -> Result<(), Error> {
    let gradient = readable(memory, shard.gradient)?;
    let factors = readable(memory, scalars.factors.buffer)?;
    let factors = Slice::new(&factors, scalars.factors.offset, scalars.factors.len);
    let mut params = take(memory, shard.params)?;
    let mut low = shard.low.as_deref_mut().map(|low| take(memory, low)).transpose()?;
    let mut state =
        shard.state.iter_mut().map(|buffer| take(memory, buffer)).collect::<Result<Vec<_>, _>>()?;
    let mirror = memory.mirror();
    let mut not_finite = mirror.allocate(Category::Workspace, DType::I64, 1)?;
    mirror.zero(Queue::Compute, SliceMut::whole(&mut not_finite))?;
    let result = {
        let mut view = SegmentShard {
            params: &mut params,
            low: low.as_mut(),
            gradient: &gradient,
            state: &mut state,
            pieces: shard.pieces,
            segment: shard.segment,
            // Directions are not gathered for shards in host memory.
            whole: None,
            not_finite: &mut not_finite,
        };
        let scalars = StepScalars { step: scalars.step, lr: scalars.lr, factors };
        run(mirror, &mut view, &scalars)
    };
    let returned = std::iter::once((params, &mut *shard.params))
        .chain(low.into_iter().zip(shard.low.as_deref_mut()))
        .chain(state.into_iter().zip(shard.state.iter_mut()));
    returned.map(|(buffer, to)| put_back(memory, buffer, to)).fold(result, Result::and)?;
    let mut flag = [0];
    mirror.read(Queue::Compute, Slice::whole(&not_finite), HostSliceMut::I64(&mut flag))?;
    if flag == [0] { Ok(()) } else { shard.note_not_finite(memory) }
}
