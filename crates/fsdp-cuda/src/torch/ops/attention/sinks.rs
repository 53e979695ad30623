//! Sinks: scores that take a share of the probability of a row, and have no value.

use fsdp_core::memory::Buffer;
use fsdp_nn::op::AttentionDims;

use super::{In, Out, int};
use crate::torch::error::Failure;
use crate::torch::memory::{Torch, arithmetic};
use crate::torch::storage::TorchStorage;

/// Samples x positions x heads.
fn scores(dims: AttentionDims) -> [i64; 3] {
    [dims.batch, dims.seq, dims.heads].map(int)
}

/// Samples x heads x positions.
fn log_sums(dims: AttentionDims) -> [i64; 3] {
    [dims.batch, dims.heads, dims.seq].map(int)
}

/// Samples x positions x heads x elements.
fn outputs(dims: AttentionDims) -> [i64; 4] {
    [dims.batch, dims.seq, dims.heads, dims.head_dim].map(int)
}

impl<D: TorchStorage> Torch<D> {
    /// Scales the output of attention by what the sinks leave, and adds them to the log-sum-exps.
    pub(super) fn aten_sink(
        &self,
        dims: AttentionDims,
        sinks: In<'_, D>,
        y: Out<'_, D>,
        lse: Out<'_, D>,
    ) -> Result<(), Failure> {
        let kind = arithmetic(sinks.buffer.dtype())?;
        let sinks = self.view(sinks, &scores(dims))?.f_to_kind(kind)?;
        let mut lse = self.view_mut(lse, &log_sums(dims))?.f_transpose(1, 2)?;
        let share = lse.f_sub(&sinks)?.f_sigmoid()?.f_unsqueeze(3)?;
        let mut y = self.view_mut(y, &outputs(dims))?;
        let scaled = y.f_to_kind(kind)?.f_mul(&share)?;
        y.f_copy_(&scaled)?;
        let total = lse.f_logaddexp(&sinks)?;
        lse.f_copy_(&total)?;
        Ok(())
    }

    /// Computes the gradients of the scores of sinks: minus their probability, times the product of output and gradient.
    pub(super) fn aten_sink_backward(
        &self,
        dims: AttentionDims,
        [sinks, y, lse, dy]: [In<'_, D>; 4],
        dsinks: Out<'_, D>,
    ) -> Result<(), Failure> {
        let kind = arithmetic(sinks.buffer.dtype())?;
        let sinks = self.view(sinks, &scores(dims))?.f_to_kind(kind)?;
        let lse = self.view(lse, &log_sums(dims))?.f_transpose(1, 2)?;
        let probability = sinks.f_sub(&lse)?.f_exp()?;
        let [y, dy] =
            [self.view(y, &outputs(dims))?.f_to_kind(kind)?, self.view(dy, &outputs(dims))?.f_to_kind(kind)?];
        let projection = y.f_mul(&dy)?.f_sum_dim_intlist(3_i64, false, None)?;
        self.view_mut(dsinks, &scores(dims))?.f_copy_(&probability.f_mul(&projection)?.f_neg()?)?;
        Ok(())
    }
}
