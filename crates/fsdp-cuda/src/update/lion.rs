//! Lion: one pass over parameters, average and gradient.

use fsdp_core::update::{SegmentShard, StepScalars, UpdateRule};
use fsdp_core::{Error, Queue};
use fsdp_nn::update::{Lion, LionFactors};

use super::on_host::with_host_shard;
use super::runs::{refresh, runs, types};
use crate::device::{CudaBuffer, CudaMemory};
use crate::kernels::{Arg, UPDATE};

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
            let mut args = run.args(memory, shard, scalars.factors)?;
            args.push(Arg::Real(keep));
            args.extend(direction.into_iter().chain(average).map(Arg::Real));
            args.push(Arg::Real(step_size));
            kernels.elements("lion", run.len, &args)?;
        }
        refresh(memory, shard)
    }
}
