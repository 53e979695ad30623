//! Conversions, scaling and sums of ranges, for which the underlying memory has kernels too: with the same bits, except
//! for NaN payloads.
//!
//! Exact sums (Kulisch's accumulator, [`ExactSum`]) are additions of integers, so ATen's order does not matter.

use fsdp_core::memory::{Arithmetic, Buffer, HostSlice, HostSliceMut, Rows, Slice, SliceMut};
use fsdp_core::{DType, ExactSum, Queue};
use fsdp_nn::host::convert::{convert_from, convert_to};
use tch::{Kind, Tensor};

use super::size::int;
use crate::torch::error::{Done, Failure};
use crate::torch::memory::Torch;
use crate::torch::storage::TorchStorage;

type In<'a, D> = Slice<'a, <D as fsdp_core::Memory>::Buffer>;
type Out<'a, D> = SliceMut<'a, <D as fsdp_core::Memory>::Buffer>;

/// Number of elements per composed operation, so that temporaries stay small.
pub(in crate::torch) const BLOCK: usize = 1 << 22;

/// Partial sums of a row: lane `l` adds the elements `l`, `l + LANES`, ..., and the lanes are combined in pairs, in the
/// same order as on the host.
const LANES: usize = 32;

/// Number of bits below the exponent of a double.
const FRACTION_BITS: i64 = 52;

/// The exponent of non-finite doubles; also a mask of exponents.
const EXPONENTS: i64 = 0x7ff;

/// Bits per digit of an exact sum.
const DIGIT_BITS: i64 = 32;

/// A mask of the lowest digit.
const DIGIT: i64 = (1 << DIGIT_BITS) - 1;

impl<D: TorchStorage> Torch<D> {
    pub(in crate::torch) fn aten_copy(
        &self,
        queue: Queue,
        src: In<'_, D>,
        dst: Out<'_, D>,
    ) -> Result<(), Failure> {
        self.raw_slice_mut(queue, dst)?.flat()?.f_copy_(&*self.raw_slice(queue, src)?.flat()?)?;
        Ok(())
    }

    pub(in crate::torch) fn aten_arithmetic(
        &self,
        queue: Queue,
        operation: Arithmetic<'_, In<'_, D>>,
        dst: Out<'_, D>,
    ) -> Result<(), Failure> {
        let dtype = dst.buffer.dtype();
        let mut dst = self.raw_slice_mut(queue, dst)?.flat()?;
        let flat = |src| -> Result<_, Failure> { Ok(self.raw_slice(queue, src)?.flat()?) };
        match operation.try_map(flat)? {
            Arithmetic::Accumulate(src) => dst.f_add_(&src).done()?,
            Arithmetic::Scale(factor) => dst.f_mul_scalar_(rounded(dtype, factor)).done()?,
            Arithmetic::SquareSum(src, rows) => {
                for &Rows { offset, len, row_len } in rows {
                    let src = src.f_narrow(0, int(offset), int(len))?.f_view([-1, int(row_len)])?;
                    for rows in src.f_split(int((BLOCK / row_len.max(LANES)).max(1)), 0)? {
                        let rows = rows.f_to_kind(Kind::Double)?;
                        add_exactly(&mut dst, &sums_of_rows(&rows.f_mul(&rows)?)?)?;
                    }
                }
            }
            Arithmetic::ExactSum(src) => {
                for values in src.f_split(int(BLOCK), 0)? {
                    add_exactly(&mut dst, &values)?;
                }
            }
            Arithmetic::AddCounts(src) => dst.f_add_(&src.f_to_kind(Kind::Int64)?).done()?,
            Arithmetic::GradientFactors { .. } => {
                unreachable!("the memory computes the few numbers of a step")
            }
        }
        Ok(())
    }
}

/// Rounds a number to a float dtype, once.
fn rounded(dtype: DType, value: f64) -> f64 {
    let (mut bytes, mut rounded) = ([0; 8], [0.0]);
    let bytes = &mut bytes[..dtype.size_bytes()];
    convert_to(HostSlice::F64(&[value]), dtype, bytes);
    convert_from(dtype, bytes, HostSliceMut::F64(&mut rounded));
    rounded[0]
}

/// The sum of every row, in the same order as on the host.
fn sums_of_rows(rows: &Tensor) -> Result<Tensor, Failure> {
    let (count, row_len) = rows.size2()?;
    let lanes_len = int(LANES);
    let mut lanes = Tensor::f_zeros([count, lanes_len], (Kind::Double, rows.device()))?;
    for start in (0..row_len).step_by(LANES) {
        let width = lanes_len.min(row_len - start);
        lanes.f_narrow(1, 0, width)?.f_add_(&rows.f_narrow(1, start, width)?).done()?;
    }
    let mut half = lanes_len / 2;
    while half > 0 {
        lanes = lanes.f_narrow(1, 0, half)?.f_add(&lanes.f_narrow(1, half, half)?)?;
        half /= 2;
    }
    Ok(lanes.f_view([count])?)
}

/// Adds doubles to the words of an exact sum, like [`ExactSum::add`]; the reader of the words propagates carries.
fn add_exactly(words: &mut Tensor, values: &Tensor) -> Result<(), Failure> {
    let bits = values.f_view_dtype(Kind::Int64)?;
    let exponents = bits.f_bitwise_right_shift_tensor_scalar(FRACTION_BITS)?.f_bitwise_and(EXPONENTS)?;
    let not_finite = exponents.f_eq(EXPONENTS)?;
    // A subnormal has no hidden bit and shares the exponent of the smallest normal number.
    let hidden = exponents.f_ne(0)?.f_to_kind(Kind::Int64)?;
    let mantissas = bits
        .f_bitwise_and((1_i64 << FRACTION_BITS) - 1)?
        .f_add(&hidden.f_mul_scalar(1_i64 << FRACTION_BITS)?)?
        .f_masked_fill(&not_finite, 0)?;
    let places = exponents.f_sub(&hidden)?;
    let shifts = places.f_bitwise_and(DIGIT_BITS - 1)?;
    // Three digits, each computed within one 64-bit word.
    let low = mantissas.f_bitwise_and(DIGIT)?.f_bitwise_left_shift(&shifts)?;
    let high = mantissas
        .f_bitwise_right_shift_tensor_scalar(DIGIT_BITS)?
        .f_bitwise_left_shift(&shifts)?
        .f_add(&low.f_bitwise_right_shift_tensor_scalar(DIGIT_BITS)?)?;
    let digits = [
        low.f_bitwise_and(DIGIT)?,
        high.f_bitwise_and(DIGIT)?,
        high.f_bitwise_right_shift_tensor_scalar(DIGIT_BITS)?,
    ];
    let signs = bits.f_lt(0)?.f_to_kind(Kind::Int64)?.f_mul_scalar(-2)?.f_add_scalar(1)?;
    let mut word_index = places.f_bitwise_right_shift_tensor_scalar(i64::from(DIGIT_BITS.ilog2()))?;
    for digit in digits {
        words.f_index_add_(0, &word_index, &digit.f_mul(&signs)?).done()?;
        word_index = word_index.f_add_scalar(1)?;
    }
    // The last word counts non-finite values.
    let count = not_finite.f_sum_dim_intlist(0_i64, true, Kind::Int64)?;
    words.f_narrow(0, int(ExactSum::WORDS - 1), 1)?.f_add_(&count).done()?;
    Ok(())
}
