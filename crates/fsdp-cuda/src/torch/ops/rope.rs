//! Rotary position embedding of packed rows, in place.

use fsdp_core::memory::{Buffer, Slice, SliceMut};
use fsdp_nn::backend::AttentionDims;
use fsdp_nn::layer::Rope;
use tch::{Kind, Tensor};

use super::size::int;
use crate::torch::error::Failure;
use crate::torch::memory::{Torch, arithmetic};
use crate::torch::storage::TorchStorage;

impl<D: TorchStorage> Torch<D> {
    pub(super) fn aten_rope(
        &self,
        dims: AttentionDims,
        rope: &Rope,
        positions: Option<(usize, Slice<'_, D::Buffer>)>,
        qkv: SliceMut<'_, D::Buffer>,
        backward: bool,
    ) -> Result<(), Failure> {
        let kind = arithmetic(qkv.buffer.dtype())?;
        let heads = dims.heads + 2 * dims.kv_heads;
        let sizes = [dims.batch, dims.seq, heads, dims.head_dim].map(int);
        let rows = self.view_mut(qkv, &sizes)?;
        let rotated = rows.f_narrow(2, 0, int(dims.heads + dims.kv_heads))?;
        let half = int(rope.rotary_dim() / 2);
        let (mut low, mut high) = (rotated.f_narrow(3, 0, half)?, rotated.f_narrow(3, half, half)?);
        let [cosines, sines] = angles(positions.map_or(dims.seq, |(below, _)| below), rope, backward)?;
        let [cosines, sines] = [
            cosines.f_to_kind(kind)?.f_to_device(rows.device())?,
            sines.f_to_kind(kind)?.f_to_device(rows.device())?,
        ];
        let [cosines, sines] = match positions {
            None => [cosines, sines],
            Some((_, positions)) => {
                let positions = self.view(positions, &[int(dims.rows())])?;
                let by_row = [int(dims.batch), int(dims.seq), 1, half];
                [
                    cosines.f_index_select(0, &positions)?.f_view(by_row)?,
                    sines.f_index_select(0, &positions)?.f_view(by_row)?,
                ]
            }
        };
        let (x, y) = (low.f_to_kind(kind)?, high.f_to_kind(kind)?);
        let new_low = x.f_mul(&cosines)?.f_sub(&y.f_mul(&sines)?)?;
        let new_high = y.f_mul(&cosines)?.f_add(&x.f_mul(&sines)?)?;
        low.f_copy_(&new_low)?;
        high.f_copy_(&new_high)?;
        Ok(())
    }
}

/// Cosines and sines by position, for all heads: of products in single precision, as in Hugging Face's implementation.
fn angles(seq: usize, rope: &Rope, backward: bool) -> Result<[Tensor; 2], Failure> {
    let positions = Tensor::f_arange(int(seq), (Kind::Float, tch::Device::Cpu))?;
    let frequencies = Tensor::f_from_slice(&rope.inverse_frequencies)?;
    let angles = positions.f_outer(&frequencies)?.f_to_kind(Kind::Double)?.f_unsqueeze(1)?;
    let [cosines, sines] =
        [angles.f_cos()?.f_mul_scalar(rope.factor)?, angles.f_sin()?.f_mul_scalar(rope.factor)?];
    Ok([cosines, if backward { sines.f_neg()? } else { sines }])
}
