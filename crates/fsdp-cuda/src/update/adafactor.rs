//! Adafactor: the host's rule, on copies where a shard lies on the device. Its statistics cross the host anyway.

use fsdp_core::update::{Piece, SegmentShard, StateTensor, StepScalars, UpdateRule};
use fsdp_core::{DType, Error};
use fsdp_nn::HostMemory;
use fsdp_nn::update::Adafactor;

use super::on_host::with_host_shard;
use crate::device::{CudaBuffer, CudaMemory};

impl UpdateRule<CudaMemory> for Adafactor {
    fn state(&self, pieces: &[Piece], shard_len: usize, dtype: DType) -> Vec<StateTensor> {
        UpdateRule::<HostMemory>::state(self, pieces, shard_len, dtype)
    }

    fn phases(&self) -> Vec<usize> {
        UpdateRule::<HostMemory>::phases(self)
    }

    fn statistics(
        &mut self,
        memory: &CudaMemory,
        phase: usize,
        shard: &mut SegmentShard<'_, CudaBuffer>,
        scalars: &StepScalars<'_, CudaBuffer>,
        earlier: &[Vec<f64>],
        sums: &mut [f64],
    ) -> Result<(), Error> {
        with_host_shard(self, memory, shard, scalars, |rule, host, shard, scalars| {
            rule.statistics(host, phase, shard, scalars, earlier, sums)
        })
    }

    fn update(
        &mut self,
        memory: &CudaMemory,
        shard: &mut SegmentShard<'_, CudaBuffer>,
        scalars: &StepScalars<'_, CudaBuffer>,
        statistics: &[Vec<f64>],
    ) -> Result<(), Error> {
        with_host_shard(self, memory, shard, scalars, |rule, host, shard, scalars| {
            rule.update(host, shard, scalars, statistics)
        })
    }
}
