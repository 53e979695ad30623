//! Shared by the composed update rules: a shard as blocks of tensors.

use fsdp_core::memory::{Buffer, Slice, SliceMut};
use fsdp_core::model::ParamId;
use fsdp_core::scalars::GradientFactors;
use fsdp_core::update::SegmentShard;
use fsdp_nn::update::Groups;
use tch::Tensor;

use crate::ffi::torch::View;
use crate::torch::error::{Done, Failure};
use crate::torch::memory::{Torch, arithmetic};
use crate::torch::ops::{BLOCK, int};
use crate::torch::storage::TorchStorage;
use crate::update::runs;

/// Neighboring elements of a shard with the same settings.
pub(super) struct Block<'a> {
    /// Scaled and clipped, in the dtype of the parameters.
    pub(super) gradient: Tensor,
    pub(super) params: View<'a>,
    pub(super) state: Vec<View<'a>>,
    /// Whether the step is finite, so that it updates.
    finite: &'a Tensor,
    /// The largest finite magnitudes of parameters and of state.
    largest: [f64; 2],
    /// The word that records whether non-finite values were written.
    not_finite: &'a mut Tensor,
}

impl Block<'_> {
    /// Writes the results of an update, unless the step is not finite.
    pub(super) fn put(&mut self, params: &Tensor, state: &[Tensor]) -> Result<(), Failure> {
        let [largest, largest_state] = self.largest;
        let slots = std::iter::once((&mut self.params, largest));
        let slots = slots.chain(self.state.iter_mut().map(|slot| (slot, largest_state)));
        for ((slot, largest), new) in slots.zip(std::iter::once(params).chain(state)) {
            let kept = new.f_where_self(self.finite, slot)?;
            slot.f_copy_(&kept)?;
            // The maximum with a NaN is NaN, which is not at most anything.
            let exceeds = new.f_abs()?.f_max()?.f_le(largest)?.f_logical_not()?.f_logical_and(self.finite)?;
            self.not_finite.f_logical_or_(&exceeds).done()?;
        }
        Ok(())
    }

    /// Panics because the number of state tensors differs from the rule's declaration.
    pub(super) fn wrong_state(&self, declared: usize) -> ! {
        panic!("{} state tensors where the rule declared {declared}", self.state.len())
    }
}

/// Calls `step` with a parameter and the tensors of each block of a shard.
pub(super) fn each_block<D: TorchStorage>(
    memory: &Torch<D>,
    shard: &mut SegmentShard<'_, D::Buffer>,
    factors: Slice<'_, D::Buffer>,
    groups: &Groups,
    step: impl Fn(ParamId, Block<'_>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let kind = arithmetic(shard.params.dtype())?;
    let factors = memory.view(factors, &[int(GradientFactors::LEN)])?;
    let finite = factors.f_select(0, 2)?.f_ne(0.0)?;
    let factors = factors.f_to_kind(kind)?;
    let [scale, clip] = [factors.f_select(0, 0)?, factors.f_select(0, 1)?];
    let largest = [shard.largest_param(), shard.params.dtype().largest()];
    let mut not_finite = memory.view_mut(SliceMut::whole(shard.not_finite), &[1])?;
    for run in runs(shard.pieces, groups) {
        for start in (0..run.len).step_by(BLOCK) {
            let (offset, len) = (run.offset + start, BLOCK.min(run.len - start));
            let sizes = [int(len)];
            let gradient = memory.view(Slice::new(shard.gradient, offset, len), &sizes)?.f_to_kind(kind)?;
            let gradient = gradient.f_mul(&scale)?.f_mul(&clip)?;
            let params = memory.view_mut(SliceMut::new(shard.params, offset, len), &sizes)?;
            let state = shard.state.iter_mut();
            let state = state
                .map(|buffer| memory.view_mut(SliceMut::new(buffer, offset, len), &sizes))
                .collect::<Result<_, _>>()?;
            let (finite, not_finite) = (&finite, &mut *not_finite);
            step(run.param, Block { gradient, params, state, finite, largest, not_finite })?;
        }
    }
    Ok(())
}
