//! Short convolutions: sums of shifted rows.

use fsdp_core::memory::Buffer;
use fsdp_nn::backend::Operands;
use fsdp_nn::op::ConvolutionDims;
use tch::{Kind, Tensor};

use super::Part;
use crate::torch::error::{Done, Failure};
use crate::torch::memory::{Torch, arithmetic};
use crate::torch::ops::int;
use crate::torch::storage::TorchStorage;

impl<D: TorchStorage> Torch<D> {
    pub(super) fn convolve(
        &self,
        dims: ConvolutionDims,
        operands: Operands<'_, '_, D::Buffer>,
    ) -> Result<(), Failure> {
        let batch = operands.batch;
        let ([x, weight], [y], _) = operands.split();
        let (kind, sizes) = (arithmetic(x.buffer.dtype())?, [dims.rows(), dims.width].map(int));
        let weights = by_distance(dims, &*self.view(weight, &[int(dims.width), int(dims.kernel)])?, kind)?;
        let (x, y) = (self.view(x, &sizes)?, self.view_mut(y.slice, &sizes)?);
        for part in Part::all((dims.batch, dims.seq), dims.packed, batch) {
            let sums = sum(&part.of(&x)?.f_to_kind(kind)?, &weights)?;
            part.of(&y)?.f_copy_(&sums.f_silu()?)?;
        }
        Ok(())
    }

    pub(super) fn convolve_backward(
        &self,
        dims: ConvolutionDims,
        operands: Operands<'_, '_, D::Buffer>,
    ) -> Result<(), Failure> {
        let batch = operands.batch;
        let ([x, weight, dy], [dx], mut more) = operands.split();
        let (kind, sizes) = (arithmetic(x.buffer.dtype())?, [dims.rows(), dims.width].map(int));
        let weights = by_distance(dims, &*self.view(weight, &[int(dims.width), int(dims.kernel)])?, kind)?;
        let (x, dy) = (self.view(x, &sizes)?, self.view(dy, &sizes)?);
        let gradient = Tensor::f_zeros(sizes, (kind, x.device()))?;
        let of_weights = Tensor::f_zeros([int(dims.kernel), int(dims.width)], (kind, x.device()))?;
        for part in Part::all((dims.batch, dims.seq), dims.packed, batch) {
            let (x, dx) = (part.of(&x)?.f_to_kind(kind)?, part.of(&gradient)?);
            let slopes = sum(&x, &weights)?.f_silu_backward(&part.of(&dy)?.f_to_kind(kind)?)?;
            for (distance, weight) in weights.iter().enumerate() {
                let Some([earlier, later]) = shifted(&x, distance) else { continue };
                let slopes = slopes.f_narrow(1, later.0, later.1)?;
                dx.f_narrow(1, earlier.0, earlier.1)?.f_add_(&slopes.f_mul(weight)?).done()?;
                let seen = x.f_narrow(1, earlier.0, earlier.1)?.f_mul(&slopes)?;
                let sums = seen.f_sum_dim_intlist([0_i64, 1].as_slice(), false, None)?;
                of_weights.f_select(0, int(dims.kernel - 1 - distance))?.f_add_(&sums).done()?;
            }
        }
        self.target(dx, &sizes)?.put(&gradient)?;
        let Some(dweight) = more.next() else { return Ok(()) };
        self.target(dweight, &[int(dims.width), int(dims.kernel)])?.put(&of_weights.f_transpose(0, 1)?)
    }
}

/// The weights of a row itself, of the row before it, and so on.
fn by_distance(dims: ConvolutionDims, weight: &Tensor, kind: Kind) -> Result<Vec<Tensor>, Failure> {
    let weight = weight.f_to_kind(kind)?;
    (0..dims.kernel).map(|distance| Ok(weight.f_select(1, int(dims.kernel - 1 - distance))?)).collect()
}

/// The rows (first and number) that others see at a distance, and those others; `None` if there are none.
fn shifted(x: &Tensor, distance: usize) -> Option<[(i64, i64); 2]> {
    let (distance, rows) = (int(distance), x.size()[1]);
    (rows > distance).then(|| [(0, rows - distance), (distance, rows - distance)])
}

fn sum(x: &Tensor, weights: &[Tensor]) -> Result<Tensor, Failure> {
    let sums = x.f_mul(&weights[0])?;
    for (distance, weight) in weights.iter().enumerate().skip(1) {
        let Some([earlier, later]) = shifted(x, distance) else { continue };
        let seen = x.f_narrow(1, earlier.0, earlier.1)?.f_mul(weight)?;
        sums.f_narrow(1, later.0, later.1)?.f_add_(&seen).done()?;
    }
    Ok(sums)
}
