//! Linear maps: matrix products into buffers of the caller, and sums over rows.

use fsdp_core::memory::{Buffer, Slice};
use fsdp_nn::backend::{Operands, Write};
use fsdp_nn::op::{Linear, LinearDims, Orientation};
use tch::{Device, Kind, Tensor};

use super::size::int;
use crate::ffi::torch as ffi;
use crate::ffi::torch::View;
use crate::torch::error::{Done, Failure};
use crate::torch::memory::{Target, Torch, arithmetic};
use crate::torch::storage::TorchStorage;

impl<D: TorchStorage> Torch<D> {
    pub(in crate::torch) fn linear(
        &self,
        op: &Linear,
        operands: Operands<'_, '_, D::Buffer>,
    ) -> Result<(), Failure> {
        match op {
            Linear::Forward { dims, .. } => {
                let bias = operands.reads.get(2).copied();
                let ([x, weight], [y], _) = operands.split();
                self.aten_linear(*dims, x, weight, bias, y)?;
            }
            Linear::BackwardInput { dims } => {
                let ([dy, weight], [dx], _) = operands.split();
                self.aten_linear_backward_input(*dims, dy, weight, dx)?;
            }
            Linear::BackwardWeight { dims } => {
                let ([x, dy], [dweight], _) = operands.split();
                self.aten_linear_backward_weight(*dims, x, dy, dweight)?;
            }
            Linear::ColumnSums { rows, columns, stride } => {
                let ([dy], [sums], _) = operands.split();
                self.aten_column_sums([*rows, *columns, *stride], dy, sums)?;
            }
        }
        Ok(())
    }

    /// A weight as a matrix of inputs x outputs.
    fn weight(&self, dims: LinearDims, weight: Slice<'_, D::Buffer>) -> Result<Tensor, Failure> {
        let (inputs, outputs) = (int(dims.inputs), int(dims.outputs));
        Ok(match dims.orientation {
            Orientation::OutIn => self.view(weight, &[outputs, inputs])?.f_tr()?,
            Orientation::InOut => self.view(weight, &[inputs, outputs])?.shallow_clone(),
        })
    }

    fn outputs<'a>(&self, dims: LinearDims, dy: Slice<'a, D::Buffer>) -> Result<View<'a>, Failure> {
        self.view_strided(dy, &[int(dims.rows), int(dims.outputs)], &[int(dims.y_stride), 1])
    }

    fn aten_linear(
        &self,
        dims: LinearDims,
        x: Slice<'_, D::Buffer>,
        weight: Slice<'_, D::Buffer>,
        bias: Option<Slice<'_, D::Buffer>>,
        y: Write<'_, D::Buffer>,
    ) -> Result<(), Failure> {
        let (rows, outputs) = (int(dims.rows), int(dims.outputs));
        let x = self.view(x, &[rows, int(dims.inputs)])?;
        let weight = self.weight(dims, weight)?;
        let accumulate = y.accumulate;
        let mut y = self.view_mut_strided(y.slice, &[rows, outputs], &[int(dims.y_stride), 1])?;
        match bias {
            None if accumulate => y.f_addmm_(&x, &weight).done()?,
            Some(bias) => self.view(bias, &[outputs])?.f_addmm_out(&y, &x, &weight).done()?,
            None => x.f_mm_out(&y, &weight).done()?,
        }
        Ok(())
    }

    fn aten_linear_backward_input(
        &self,
        dims: LinearDims,
        dy: Slice<'_, D::Buffer>,
        weight: Slice<'_, D::Buffer>,
        dx: Write<'_, D::Buffer>,
    ) -> Result<(), Failure> {
        let dy = self.outputs(dims, dy)?;
        let weight = self.weight(dims, weight)?.f_tr()?;
        product(&dy, &weight, self.target(dx, &[int(dims.rows), int(dims.inputs)])?)
    }

    fn aten_linear_backward_weight(
        &self,
        dims: LinearDims,
        x: Slice<'_, D::Buffer>,
        dy: Slice<'_, D::Buffer>,
        dweight: Write<'_, D::Buffer>,
    ) -> Result<(), Failure> {
        let (inputs, outputs) = (int(dims.inputs), int(dims.outputs));
        let x = self.view(x, &[int(dims.rows), inputs])?;
        let dy = self.outputs(dims, dy)?;
        match dims.orientation {
            Orientation::OutIn => product(&dy.f_tr()?, &x, self.target(dweight, &[outputs, inputs])?),
            Orientation::InOut => product(&x.f_tr()?, &dy, self.target(dweight, &[inputs, outputs])?),
        }
    }

    fn aten_column_sums(
        &self,
        [rows, columns, stride]: [usize; 3],
        dy: Slice<'_, D::Buffer>,
        sums: Write<'_, D::Buffer>,
    ) -> Result<(), Failure> {
        let kind = arithmetic(dy.buffer.dtype())?;
        let dy = self.view_strided(dy, &[int(rows), int(columns)], &[int(stride), 1])?;
        let column_sums = dy.f_sum_dim_intlist(0_i64, false, kind)?;
        self.target(sums, &[int(columns)])?.put(&column_sums)
    }
}

/// `target = lhs rhs`, or `target += lhs rhs`. The operands have the same dtype; if the target has another one, the
/// product is computed in the arithmetic type and then rounded.
pub(in crate::torch) fn product(lhs: &Tensor, rhs: &Tensor, mut target: Target<'_>) -> Result<(), Failure> {
    let (from, to) = (lhs.f_kind()?, target.slot.f_kind()?);
    if from == to {
        if target.accumulate {
            target.slot.f_addmm_(lhs, rhs).done()?;
        } else {
            lhs.f_mm_out(&target.slot, rhs).done()?;
        }
        return Ok(());
    }
    let is_half = matches!(from, Kind::BFloat16 | Kind::Half);
    if is_half && to == Kind::Float {
        return widening_product(lhs, rhs, target);
    }
    let wide = if is_half { Kind::Float } else { from };
    target.put(&lhs.f_to_kind(wide)?.f_mm(&rhs.f_to_kind(wide)?)?)
}

/// A product of bf16 or f16 operands into f32, in the device's matrix units if it has any.
fn widening_product(lhs: &Tensor, rhs: &Tensor, mut target: Target<'_>) -> Result<(), Failure> {
    match (lhs.device(), target.accumulate) {
        (Device::Cpu, accumulate) if lhs.f_kind()? == Kind::BFloat16 && ffi::multiplies_halves() => {
            ffi::multiply_halves(lhs, rhs, &mut target.slot, accumulate)?;
        }
        (Device::Cpu, false) => {
            lhs.f_to_kind(Kind::Float)?.f_mm_out(&target.slot, &rhs.f_to_kind(Kind::Float)?).done()?;
        }
        (Device::Cpu, true) => {
            target.slot.f_addmm_(&lhs.f_to_kind(Kind::Float)?, &rhs.f_to_kind(Kind::Float)?).done()?;
        }
        (_, false) => {
            lhs.f_mm_dtype_out(&target.slot, rhs, Kind::Float).done()?;
        }
        (_, true) => {
            // The same tensor as addend and result: a different tensor over the same memory would be copied first.
            target.slot.f_addmm_dtype_out(&target.slot, lhs, rhs, Kind::Float).done()?;
        }
    }
    Ok(())
}
