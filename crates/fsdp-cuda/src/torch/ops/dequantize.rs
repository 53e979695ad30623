//! Decodes quantized weights.

use fsdp_nn::backend::Operands;
use fsdp_nn::quantized::{CodeBook, Format, NESTED_BLOCK, Packed};
use tch::{Kind, Tensor};

use super::size::int;
use crate::torch::error::Failure;
use crate::torch::memory::Torch;
use crate::torch::storage::TorchStorage;

/// Elements that are decoded at once, with 16 bytes of temporary memory each.
const DECODED_ELEMS: usize = 1 << 22;

impl<D: TorchStorage> Torch<D> {
    pub(in crate::torch) fn dequantize(
        &self,
        matrix: Packed,
        operands: Operands<'_, '_, D::Buffer>,
    ) -> Result<(), Failure> {
        let ([bytes], [weight], _) = operands.split();
        let bytes = self.view(bytes, &[matrix.rows, matrix.stored().row_bytes].map(int))?;
        let weight = self.view_mut(weight.slice, &[matrix.rows, matrix.columns].map(int))?;
        decode(matrix, &bytes, &weight)
    }
}

/// Decodes a matrix of bytes, a few rows at a time.
pub(super) fn decode(matrix: Packed, bytes: &Tensor, weight: &Tensor) -> Result<(), Failure> {
    let values = Tensor::f_from_slice(&matrix.format.values())?.f_to_device(bytes.device())?;
    let rows = (DECODED_ELEMS / matrix.columns).clamp(1, matrix.rows);
    for first in (0..matrix.rows).step_by(rows) {
        let count = int(rows.min(matrix.rows - first));
        let bytes = bytes.f_narrow(0, int(first), count)?;
        let codes = bytes.f_narrow(1, 0, int(matrix.columns / 2))?;
        let code = |shift: u8| codes.f_bitwise_right_shift_tensor_scalar(i64::from(shift))?.f_bitwise_and(15);
        let both = Tensor::f_stack(
            &matrix.format.shifts().map(code).into_iter().collect::<Result<Vec<_>, _>>()?,
            2,
        )?;
        let elements = values.f_index_select(0, &both.f_flatten(0, -1)?.f_to_kind(Kind::Int)?)?;
        let elements = elements.f_view([count, int(matrix.blocks()), int(matrix.format.block())])?;
        let decoded = elements.f_mul(&scales(matrix, first, &bytes)?.f_unsqueeze(2)?)?;
        weight.f_narrow(0, int(first), count)?.f_copy_(&decoded.f_flatten(1, 2)?)?;
    }
    Ok(())
}

/// The scale of each block of these rows, which begin with row `first`: rows x blocks.
fn scales(matrix: Packed, first: usize, bytes: &Tensor) -> Result<Tensor, Failure> {
    let (start, blocks) = (int(matrix.columns / 2), int(matrix.blocks()));
    let of_blocks = || bytes.f_narrow(1, start, blocks)?.f_to_kind(Kind::Int);
    let floats = |from: i64| -> Result<Tensor, Failure> {
        let bytes = bytes.f_narrow(1, from, bytes.size()[1] - from)?;
        // A copy: rows begin anywhere.
        let copied = Tensor::f_empty(bytes.size(), (Kind::Uint8, bytes.device()))?;
        copied.shallow_clone().f_copy_(&bytes)?;
        Ok(copied.f_view_dtype(Kind::Float)?)
    };
    match matrix.format {
        Format::Nf4Single => floats(start),
        Format::Nf4 => {
            let book = Tensor::f_from_slice(&CodeBook::signed().values)?.f_to_device(bytes.device())?;
            let codes = book.f_index_select(0, &of_blocks()?.f_flatten(0, -1)?)?.f_view([-1, blocks])?;
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
        Format::Mxfp4 => {
            // Bytes become exponents of floats; 0 is the smallest power of two, 255 is not a number.
            let bytes = of_blocks()?;
            let (zero, nan) = (bytes.f_eq(0)?.f_to_kind(Kind::Int)?, bytes.f_eq(255)?.f_to_kind(Kind::Int)?);
            let bits = bytes.f_bitwise_left_shift_tensor_scalar(23)?;
            let bits = bits.f_add(&zero.f_add(&nan)?.f_bitwise_left_shift_tensor_scalar(22)?)?;
            Ok(bits.f_view_dtype(Kind::Float)?)
        }
    }
}
