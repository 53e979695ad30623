//! Lion: one pass over parameters, average and gradient.

use fsdp_core::update::{SegmentShard, StepScalars, UpdateRule};
use fsdp_core::{Error, Queue};
use fsdp_nn::update::{Lion, LionFactors};

use super::on_host::with_host_shard;
use super::runs::{refresh, runs, types};
use crate::device::{CudaBuffer, CudaMemory};
use crate::kernels::{UPDATE, Word};

impl UpdateRule<CudaMemory> for Lion {
    fn update(
        &mut self,
        memory: &CudaMemory,
        shard: &mut SegmentShard<'_, CudaBuffer>,
        scalars: &StepScalars<'_, CudaBuffer>,
        _statistics: &[CudaBuffer],
    ) -> Result<(), Error> {
        if shard.params.is_on_host() {
            return with_host_shard(memory, shard, scalars, |host, shard, scalars| {
                self.update(host, shard, scalars, &[])
            });
        }
        let kernels = memory.kernels(Queue::Compute, &UPDATE, types(shard)?);
        for run in runs(shard.pieces, &self.groups) {
            let LionFactors { keep, direction, average, step_size } = self.factors(run.param, scalars.lr);
            let mut words = run.words(memory, shard, scalars.factors)?;
            words.push(Word::Real(keep));
            words.extend(direction.into_iter().chain(average).map(Word::Real));
            words.push(Word::Real(step_size));
            kernels.elements("lion", run.len, &words)?;
        }
        refresh(memory, shard)
    }
}
