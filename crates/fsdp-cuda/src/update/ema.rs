//! The exponential moving average of the parameters: one pass over both.

use fsdp_core::memory::{Slice, SliceMut};
use fsdp_core::update::{SegmentShard, StepScalars, UpdateRule};
use fsdp_core::{Error, Queue};
use fsdp_nn::update::{Ema, Groups};

use super::on_host::with_host_shard;
use super::runs::{runs, types};
use crate::device::{CudaBuffer, CudaMemory};
use crate::kernels::{Arg, UPDATE};

impl UpdateRule<CudaMemory> for Ema {
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
        let largest_param = Arg::Real(shard.largest_param());
        let [average] = &mut *shard.state else {
            panic!("{} state tensors where the rule declared 1", shard.state.len());
        };
        for run in runs(shard.pieces, &Groups::uniform(0.0)) {
            let args = [
                memory.input(Slice::new(shard.params, run.offset, run.len))?,
                memory.output(SliceMut::new(average, run.offset, run.len))?,
                Arg::Len(run.len),
                memory.input(scalars.factors)?,
                memory.output(SliceMut::whole(shard.not_finite))?,
                largest_param,
                Arg::Real(self.weight(scalars.step)),
            ];
            kernels.elements("ema", run.len, &args)?;
        }
        Ok(())
    }
}
