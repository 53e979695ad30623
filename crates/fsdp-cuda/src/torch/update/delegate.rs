//! Rules that delegate to the underlying memory: a single pass there would be several compositions here.

use fsdp_core::Error;
use fsdp_core::update::{SegmentShard, StepScalars, UpdateRule};
use fsdp_nn::update::{Adafactor, AdamW8bit, Ema, Lion, Muon};

use crate::torch::memory::Torch;
use crate::torch::storage::TorchStorage;

macro_rules! delegate {
    ($($rule:ty),*) => {$(
        impl<D: TorchStorage> UpdateRule<Torch<D>> for $rule
        where
            $rule: UpdateRule<D>,
        {
            fn statistics(
                &mut self,
                memory: &Torch<D>,
                shard: &mut SegmentShard<'_, D::Buffer>,
                scalars: &StepScalars<'_, D::Buffer>,
                earlier: &[D::Buffer],
                sums: &mut D::Buffer,
            ) -> Result<(), Error> {
                UpdateRule::<D>::statistics(self, memory.storage(), shard, scalars, earlier, sums)
            }

            fn direct(
                &mut self,
                memory: &Torch<D>,
                shard: &mut SegmentShard<'_, D::Buffer>,
                scalars: &StepScalars<'_, D::Buffer>,
                direction: &mut D::Buffer,
            ) -> Result<(), Error> {
                UpdateRule::<D>::direct(self, memory.storage(), shard, scalars, direction)
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
    )*};
}

delegate!(Adafactor, AdamW8bit, Ema, Lion, Muon);
