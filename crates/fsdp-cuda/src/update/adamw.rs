//! AdamW: one pass over parameters, state and gradient.

use fsdp_core::update::{SegmentShard, StepScalars, UpdateRule};
use fsdp_core::{Error, Queue};
use fsdp_nn::update::{AdamW, AdamWFactors};

use super::on_host::with_host_shard;
use super::runs::{refresh, runs, types};
use crate::device::{CudaBuffer, CudaMemory};
use crate::kernels::{Arg, UPDATE};

impl UpdateRule<CudaMemory> for AdamW {
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
            let mut args = run.args(memory, shard, scalars.factors)?;
            args.extend(factor_args(self.factors(run.param, scalars.step, scalars.lr)));
            kernels.elements("adamw", run.len, &args)?;
        }
        refresh(memory, shard)
    }
}

/// The last parameters of the AdamW kernels.
pub(super) fn factor_args(factors: AdamWFactors) -> [Arg<'static>; 8] {
    let AdamWFactors { keep, weight, by_end, beta2, square, root_correction, eps, step_size } = factors;
    let by_end = Arg::Int(u32::from(by_end));
    let [keep, weight] = [keep, weight].map(Arg::Real);
    let [beta2, square, root_correction, eps, step_size] =
        [beta2, square, root_correction, eps, step_size].map(Arg::Real);
    [keep, weight, by_end, beta2, square, root_correction, eps, step_size]
}
