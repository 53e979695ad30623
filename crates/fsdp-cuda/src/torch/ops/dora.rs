//! DoRA: the lengths of rows of adapted weights, and products by one number per column.

use fsdp_core::memory::{Buffer, Slice};
use fsdp_nn::backend::{Operands, Write};
use fsdp_nn::op::{AdaptedDims, Dora, Orientation};
use tch::Tensor;

use super::size::int;
use crate::torch::error::Failure;
use crate::torch::memory::{Torch, arithmetic};
use crate::torch::storage::TorchStorage;

/// Elements of a weight that are summed at once, in temporary memory.
const SUMMED_ELEMS: usize = 1 << 22;

impl<D: TorchStorage> Torch<D> {
    pub(in crate::torch) fn dora(
        &self,
        op: &Dora,
        operands: Operands<'_, '_, D::Buffer>,
    ) -> Result<(), Failure> {
        match *op {
            Dora::Norms { dims } => {
                let (reads, [norms], _) = operands.split();
                self.aten_row_norms(dims, reads, norms)?;
            }
            Dora::Rescale { width, .. } => {
                let bias = operands.reads.get(3).copied();
                let ([x, magnitude, norms], [y], _) = operands.split();
                let factors = self.columns(magnitude)?.f_div(&self.columns(norms)?)?;
                let x = self.view(x, &[int(x.len / width), int(width)])?.f_to_kind(factors.f_kind()?)?;
                let mut scaled = x.f_mul(&factors)?;
                if let Some(bias) = bias {
                    scaled = scaled.f_add(&self.columns(bias)?)?;
                }
                let sizes = [int(y.slice.len / width), int(width)];
                self.view_mut(y.slice, &sizes)?.f_copy_(&scaled)?;
            }
            Dora::RescaleBackward { width, .. } => {
                let ([x, magnitude, norms], [dy, dmagnitude], _) = operands.split();
                let (magnitude, norms) = (self.columns(magnitude)?, self.columns(norms)?);
                let sizes = [int(x.len / width), int(width)];
                let mut dy = self.view_mut(dy.slice, &sizes)?;
                let (x, kind) = (self.view(x, &sizes)?, norms.f_kind()?);
                let products = dy.f_to_kind(kind)?.f_mul(&x.f_to_kind(kind)?)?;
                let sums = products.f_sum_dim_intlist(0_i64, false, None)?.f_div(&norms)?;
                self.target(dmagnitude, &[int(width)])?.put(&sums)?;
                let scaled = dy.f_to_kind(kind)?.f_mul(&magnitude.f_div(&norms)?)?;
                dy.f_copy_(&scaled)?;
            }
        }
        Ok(())
    }

    /// One number per column, in the arithmetic type.
    fn columns(&self, slice: Slice<'_, D::Buffer>) -> Result<Tensor, Failure> {
        let kind = arithmetic(slice.buffer.dtype())?;
        Ok(self.view(slice, &[int(slice.len)])?.f_to_kind(kind)?)
    }

    fn aten_row_norms(
        &self,
        dims: AdaptedDims,
        [weight, down, up]: [Slice<'_, D::Buffer>; 3],
        norms: Write<'_, D::Buffer>,
    ) -> Result<(), Failure> {
        let [inputs, outputs, rank] = [dims.inputs, dims.outputs, dims.rank].map(int);
        let kind = arithmetic(weight.buffer.dtype())?;
        let weight = match dims.orientation {
            Orientation::OutIn => self.view(weight, &[outputs, inputs])?.shallow_clone(),
            Orientation::InOut => self.view(weight, &[inputs, outputs])?.f_tr()?,
        };
        let down = self.view(down, &[rank, inputs])?.f_to_kind(kind)?.f_mul_scalar(dims.scale)?;
        let up = self.view(up, &[outputs, rank])?.f_to_kind(kind)?;
        let norms = self.view_mut(norms.slice, &[outputs])?;
        let rows = (SUMMED_ELEMS / dims.inputs).clamp(1, dims.outputs);
        for first in (0..dims.outputs).step_by(rows) {
            let part = |of: &Tensor| of.f_narrow(0, int(first), int(rows.min(dims.outputs - first)));
            let sums = part(&weight)?.f_to_kind(kind)?.f_addmm(&part(&up)?, &down)?;
            let lengths = sums.f_square()?.f_sum_dim_intlist(1_i64, false, None)?.f_sqrt()?;
            part(&norms)?.f_copy_(&lengths)?;
        }
        Ok(())
    }
}
