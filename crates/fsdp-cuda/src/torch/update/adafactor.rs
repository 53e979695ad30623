//! Adafactor: that of the memory below.

use fsdp_core::update::{Piece, SegmentShard, StateTensor, StepScalars, UpdateRule};
use fsdp_core::{DType, Error};
use fsdp_nn::update::Adafactor;

use crate::torch::memory::Torch;
use crate::torch::storage::TorchStorage;

impl<D: TorchStorage> UpdateRule<Torch<D>> for Adafactor
where
    Adafactor: UpdateRule<D>,
{
    fn state(&self, pieces: &[Piece], shard_len: usize, dtype: DType) -> Vec<StateTensor> {
        UpdateRule::<D>::state(self, pieces, shard_len, dtype)
    }

    fn phases(&self) -> Vec<usize> {
        UpdateRule::<D>::phases(self)
    }

    fn statistics(
        &mut self,
        memory: &Torch<D>,
        phase: usize,
        shard: &mut SegmentShard<'_, D::Buffer>,
        scalars: &StepScalars<'_, D::Buffer>,
        earlier: &[D::Buffer],
        sums: &mut D::Buffer,
    ) -> Result<(), Error> {
        UpdateRule::<D>::statistics(self, memory.storage(), phase, shard, scalars, earlier, sums)
    }

    fn update(
        &mut self,
        memory: &Torch<D>,
        shard: &mut SegmentShard<'_, D::Buffer>,
        scalars: &StepScalars<'_, D::Buffer>,
        statistics: &[D::Buffer],
    ) -> Result<(), Error> {
        UpdateRule::<D>::update(self, memory.storage(), shard, scalars, statistics)
    }
}
