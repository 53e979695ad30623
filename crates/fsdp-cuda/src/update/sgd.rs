//! Stochastic gradient descent: one pass over parameters, momentum and gradient.

use fsdp_core::update::{SegmentShard, StepScalars, UpdateRule};
use fsdp_core::{Error, Queue};
use fsdp_nn::update::{GroupSettings, Sgd};

use super::on_host::with_host_shard;
use super::runs::{refresh, runs, types};
use crate::device::{CudaBuffer, CudaMemory};
use crate::kernels::{Arg, UPDATE};

impl UpdateRule<CudaMemory> for Sgd {
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
            let group = self.groups.of(run.param);
            let GroupSettings { lr_scale, weight_decay, .. } = group;
            let mut args = run.args(memory, shard, scalars.factors)?;
            args.extend([weight_decay, scalars.lr * lr_scale].map(Arg::Real));
            if self.momentum == 0.0 {
                kernels.elements("sgd", run.len, &args)?;
                continue;
            }
            args.extend([self.momentum, 1.0 - self.dampening].map(Arg::Real));
            args.extend(
                [self.nesterov, group.own_step(scalars.step) == 1].map(|flag| Arg::Int(u32::from(flag))),
            );
            kernels.elements("sgd_momentum", run.len, &args)?;
        }
        refresh(memory, shard)
    }
}
