//! Norms over rows, computed in the arithmetic type, in which statistics are stored too.

use fsdp_core::memory::{Buffer, Slice, SliceMut};
use fsdp_nn::backend::{Operands, Write};
use fsdp_nn::op::Norm;
use tch::Tensor;

use super::size::int;
use crate::torch::error::Failure;
use crate::torch::memory::{Torch, arithmetic};
use crate::torch::storage::TorchStorage;

type In<'a, D> = Slice<'a, <D as fsdp_core::Memory>::Buffer>;
type Out<'a, D> = SliceMut<'a, <D as fsdp_core::Memory>::Buffer>;

impl<D: TorchStorage> Torch<D> {
    pub(in crate::torch) fn norm(
        &self,
        op: &Norm,
        operands: Operands<'_, '_, D::Buffer>,
    ) -> Result<(), Failure> {
        match *op {
            Norm::Rms { width, eps, offset, .. } => {
                let ([x, weight], [y, rstd], _) = operands.split();
                let scale = self.rows(width, weight)?.f_add_scalar(offset)?;
                self.aten_rms_norm(width, eps, x, &scale, y.slice, rstd.slice)?;
            }
            Norm::RmsBackward { width, offset, .. } => {
                let ([x, weight, rstd, dy], [dx], mut more) = operands.split();
                let scale = self.rows(width, weight)?.f_add_scalar(offset)?;
                self.aten_rms_norm_backward(width, &scale, [x, rstd, dy], dx, more.next())?;
            }
            Norm::Layer { width, eps, .. } => {
                let bias = operands.reads.get(2).copied();
                let ([x, weight], [y, stats], _) = operands.split();
                self.aten_layer_norm((width, eps), [x, weight], bias, y.slice, stats.slice)?;
            }
            Norm::LayerBackwardInput { width, .. } => {
                let (reads, [dx], _) = operands.split();
                self.aten_layer_norm_backward_input(width, reads, dx)?;
            }
            Norm::LayerBackwardWeight { width, .. } => {
                let (reads, [dweight], _) = operands.split();
                self.aten_layer_norm_backward_weight(width, reads, dweight)?;
            }
        }
        Ok(())
    }

    /// Rows of `width` elements, in the arithmetic type.
    fn rows(&self, width: usize, slice: In<'_, D>) -> Result<Tensor, Failure> {
        let kind = arithmetic(slice.buffer.dtype())?;
        Ok(self.view(slice, &[int(slice.len / width), int(width)])?.f_to_kind(kind)?)
    }

    fn write_rows(&self, width: usize, to: Write<'_, D::Buffer>, values: &Tensor) -> Result<(), Failure> {
        let sizes = [int(to.slice.len / width), int(width)];
        self.target(to, &sizes)?.put(values)
    }

    /// Mean and reciprocal standard deviation of every row, as columns.
    fn statistics(&self, stats: In<'_, D>) -> Result<[Tensor; 2], Failure> {
        let stats = self.view(stats, &[int(stats.len / 2), 2])?;
        Ok([stats.f_narrow(1, 0, 1)?, stats.f_narrow(1, 1, 1)?])
    }

    fn aten_rms_norm(
        &self,
        width: usize,
        eps: f64,
        x: In<'_, D>,
        weight: &Tensor,
        y: Out<'_, D>,
        rstd: Out<'_, D>,
    ) -> Result<(), Failure> {
        let x = self.rows(width, x)?;
        let squares = x.f_square()?.f_mean_dim(-1_i64, true, None)?;
        let scale = squares.f_add_scalar(eps)?.f_rsqrt()?;
        let rows = int(rstd.len);
        self.view_mut(rstd, &[rows, 1])?.f_copy_(&scale)?;
        self.write_rows(width, Write::over(y), &x.f_mul(&scale)?.f_mul(weight)?)
    }

    fn aten_rms_norm_backward(
        &self,
        width: usize,
        weight: &Tensor,
        [x, rstd, dy]: [In<'_, D>; 3],
        dx: Write<'_, D::Buffer>,
        dweight: Option<Write<'_, D::Buffer>>,
    ) -> Result<(), Failure> {
        let (x, dy) = (self.rows(width, x)?, self.rows(width, dy)?);
        let rstd = self.view(rstd, &[int(rstd.len), 1])?;
        let normal = x.f_mul(&rstd)?;
        let slope = dy.f_mul(weight)?;
        let mean = slope.f_mul(&normal)?.f_mean_dim(-1_i64, true, None)?;
        let gradient = slope.f_sub(&normal.f_mul(&mean)?)?.f_mul(&rstd)?;
        self.write_rows(width, dx, &gradient)?;
        let Some(dweight) = dweight else { return Ok(()) };
        let sums = dy.f_mul(&normal)?.f_sum_dim_intlist(0_i64, false, None)?;
        self.target(dweight, &[int(width)])?.put(&sums)
    }

    fn aten_layer_norm(
        &self,
        (width, eps): (usize, f64),
        [x, weight]: [In<'_, D>; 2],
        bias: Option<In<'_, D>>,
        y: Out<'_, D>,
        stats: Out<'_, D>,
    ) -> Result<(), Failure> {
        let [x, weight] = [self.rows(width, x)?, self.rows(width, weight)?];
        let mean = x.f_mean_dim(-1_i64, true, None)?;
        let deviations = x.f_sub(&mean)?;
        let variance = deviations.f_square()?.f_mean_dim(-1_i64, true, None)?;
        let rstd = variance.f_add_scalar(eps)?.f_rsqrt()?;
        let rows = int(stats.len / 2);
        let stats = self.view_mut(stats, &[rows, 2])?;
        stats.f_narrow(1, 0, 1)?.f_copy_(&mean)?;
        stats.f_narrow(1, 1, 1)?.f_copy_(&rstd)?;
        let mut normal = deviations.f_mul(&rstd)?.f_mul(&weight)?;
        if let Some(bias) = bias {
            normal = normal.f_add(&self.rows(width, bias)?)?;
        }
        self.write_rows(width, Write::over(y), &normal)
    }

    fn aten_layer_norm_backward_input(
        &self,
        width: usize,
        [x, weight, stats, dy]: [In<'_, D>; 4],
        dx: Write<'_, D::Buffer>,
    ) -> Result<(), Failure> {
        let [mean, rstd] = self.statistics(stats)?;
        let normal = self.rows(width, x)?.f_sub(&mean)?.f_mul(&rstd)?;
        let slope = self.rows(width, dy)?.f_mul(&self.rows(width, weight)?)?;
        let offset = slope.f_mean_dim(-1_i64, true, None)?;
        let projection = slope.f_mul(&normal)?.f_mean_dim(-1_i64, true, None)?;
        let gradient = slope.f_sub(&offset)?.f_sub(&normal.f_mul(&projection)?)?.f_mul(&rstd)?;
        self.write_rows(width, dx, &gradient)
    }

    fn aten_layer_norm_backward_weight(
        &self,
        width: usize,
        [x, stats, dy]: [In<'_, D>; 3],
        dweight: Write<'_, D::Buffer>,
    ) -> Result<(), Failure> {
        let [mean, rstd] = self.statistics(stats)?;
        let normal = self.rows(width, x)?.f_sub(&mean)?.f_mul(&rstd)?;
        let sums = self.rows(width, dy)?.f_mul(&normal)?.f_sum_dim_intlist(0_i64, false, None)?;
        self.target(dweight, &[int(width)])?.put(&sums)
    }
}
