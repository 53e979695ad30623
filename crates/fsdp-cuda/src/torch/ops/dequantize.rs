//! Decodes quantized weights.

use fsdp_core::memory::Buffer;
use fsdp_nn::backend::Operands;
use fsdp_nn::quantized::{BLOCK, CodeBook, NESTED_BLOCK, Nf4, ScaleFormat, VALUES};
use tch::{Kind, Tensor};

use super::size::int;
use crate::torch::error::{Done, Failure};
use crate::torch::memory::Torch;
use crate::torch::storage::TorchStorage;

/// Elements that are decoded at once, with 16 bytes of temporary memory each.
const DECODED_ELEMS: usize = 1 << 22;

impl<D: TorchStorage> Torch<D> {
    pub(in crate::torch) fn dequantize(
        &self,
        matrix: Nf4,
        operands: Operands<'_, '_, D::Buffer>,
    ) -> Result<(), Failure> {
        let ([bytes], [weight], _) = operands.split();
        let bytes = self.view(bytes, &[matrix.rows, matrix.stored().row_bytes].map(int))?;
        let weight = self.view_mut(weight.slice, &[matrix.rows, matrix.blocks(), BLOCK].map(int))?;
        let device = bytes.device();
        let values = Tensor::f_from_slice(&VALUES)?.f_to_device(device)?;
        let rows = (DECODED_ELEMS / matrix.columns).clamp(1, matrix.rows);
        for first in (0..matrix.rows).step_by(rows) {
            let count = int(rows.min(matrix.rows - first));
            let bytes = bytes.f_narrow(0, int(first), count)?;
            let codes = bytes.f_narrow(1, 0, int(matrix.columns / 2))?;
            let upper = codes.f_bitwise_right_shift_tensor_scalar(4)?;
            let both = Tensor::f_stack(&[upper, codes.f_bitwise_and(15)?], 2)?.f_flatten(0, -1)?;
            let elements = values.f_index_select(0, &both.f_to_kind(Kind::Int)?)?;
            let elements = elements.f_view([count, int(matrix.blocks()), int(BLOCK)])?;
            let decoded = elements.f_mul(&scales(matrix, first, &bytes)?.f_unsqueeze(2)?)?;
            weight.f_narrow(0, int(first), count)?.f_copy_(&decoded)?;
        }
        Ok(())
    }
}

/// The scale of each block of these rows, which begin with row `first`: rows x blocks.
fn scales(matrix: Nf4, first: usize, bytes: &Tensor) -> Result<Tensor, Failure> {
    let (start, blocks) = (int(matrix.columns / 2), int(matrix.blocks()));
    let floats = |from: i64| -> Result<Tensor, Failure> {
        let bytes = bytes.f_narrow(1, from, bytes.size()[1] - from)?;
        Ok(bytes.f_contiguous()?.f_view_dtype(Kind::Float)?)
    };
    match matrix.scales {
        ScaleFormat::Single => floats(start),
        ScaleFormat::Nested => {
            let codes = bytes.f_narrow(1, start, blocks)?.f_flatten(0, -1)?.f_to_kind(Kind::Int)?;
            let book = Tensor::f_from_slice(&CodeBook::signed().values)?.f_to_device(bytes.device())?;
            let codes = book.f_index_select(0, &codes)?.f_view([-1, blocks])?;
            let nested = floats(start + blocks)?;
            let last = nested.size()[1] - 1;
            // The number of each block's scale among those of its row.
            let of_row = |row: usize| {
                let from = row * matrix.blocks();
                (from..from + matrix.blocks()).map(move |at| int(at / NESTED_BLOCK - from / NESTED_BLOCK))
            };
            let rows = first..first + codes.size()[0].unsigned_abs() as usize;
            let index: Vec<i64> = rows.flat_map(of_row).collect();
            let index = Tensor::f_from_slice(&index)?.f_view([-1, blocks])?.f_to_device(bytes.device())?;
            let scale = nested.f_gather(1, &index, false)?;
            Ok(codes.f_mul(&scale)?.f_add(&nested.f_narrow(1, last, 1)?)?)
        }
    }
}
