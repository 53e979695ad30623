//! Updates on the host, by the host's rules.

use fsdp_core::memory::{Category, HostSliceMut, Memory, Slice, SliceMut};
use fsdp_core::update::{SegmentShard, Stage, StepScalars};
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::HostBuffer;
use fsdp_nn::backend::{Backend, Outcome};
use fsdp_nn::update::Part;

use crate::device::{CudaBuffer, CudaMemory, put_back, readable, take};

impl CudaMemory {
    /// Runs the host's part of a rule on a shard in pinned memory, after all earlier work on the compute queue.
    pub(super) fn update_on_host(
        &self,
        part: &Part,
        stage: &mut Stage<'_, CudaBuffer>,
        shard: &mut SegmentShard<'_, CudaBuffer>,
        scalars: &StepScalars<'_, CudaBuffer>,
    ) -> Result<Outcome, Error> {
        let all = |sums: &[CudaBuffer]| -> Result<Vec<HostBuffer>, Error> {
            sums.iter().map(|sums| readable(self, sums)).collect()
        };
        match stage {
            Stage::Statistics { earlier, sums } => {
                let earlier = all(earlier)?;
                let mut host_sums = take(self, sums)?;
                let stage = Stage::Statistics { earlier: &earlier, sums: &mut host_sums };
                let result = with_host_shard(self, part, stage, shard, scalars);
                put_back(self, host_sums, sums)?;
                result
            }
            Stage::Update { statistics } => {
                let statistics = all(statistics)?;
                with_host_shard(self, part, Stage::Update { statistics: &statistics }, shard, scalars)
            }
            Stage::Direct { .. } => Ok(Outcome::Unsupported),
        }
    }
}

fn with_host_shard(
    memory: &CudaMemory,
    part: &Part,
    mut stage: Stage<'_, HostBuffer>,
    shard: &mut SegmentShard<'_, CudaBuffer>,
    scalars: &StepScalars<'_, CudaBuffer>,
) -> Result<Outcome, Error> {
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
        mirror.update(part, &mut stage, &mut view, &scalars)
    };
    let returned = std::iter::once((params, &mut *shard.params))
        .chain(low.into_iter().zip(shard.low.as_deref_mut()))
        .chain(state.into_iter().zip(shard.state.iter_mut()));
    let outcome = returned
        .map(|(buffer, to)| put_back(memory, buffer, to))
        .fold(result, |result, back| result.and_then(|outcome| back.map(|()| outcome)))?;
    let mut flag = [0];
    mirror.read(Queue::Compute, Slice::whole(&not_finite), HostSliceMut::I64(&mut flag))?;
    if flag != [0] {
        shard.note_not_finite(memory)?;
    }
    Ok(outcome)
}
