//! AdamW: one pass over parameters, state and gradient.

use fsdp_core::update::{SegmentShard, StepScalars, UpdateRule};
use fsdp_core::{Error, Queue};
use fsdp_nn::update::{AdamW, AdamWFactors};

use super::on_host::with_host_shard;
use super::runs::{refresh, runs, types};
use crate::device::{CudaBuffer, CudaMemory};
use crate::kernels::{UPDATE, Word};

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
            let mut words = run.words(memory, shard, scalars.factors)?;
            words.extend(numbers(self.factors(run.param, scalars.step, scalars.lr)));
            kernels.elements("adamw", run.len, &words)?;
        }
        refresh(memory, shard)
    }
}

/// The last parameters of the AdamW kernels.
pub(super) fn numbers(factors: AdamWFactors) -> [Word<'static>; 8] {
    let AdamWFactors { keep, weight, by_end, beta2, square, root_correction, eps, step_size } = factors;
    let by_end = Word::Int(u32::from(by_end));
    let [keep, weight] = [keep, weight].map(Word::Real);
    let [beta2, square, root_correction, eps, step_size] =
        [beta2, square, root_correction, eps, step_size].map(Word::Real);
    [keep, weight, by_end, beta2, square, root_correction, eps, step_size]
}
