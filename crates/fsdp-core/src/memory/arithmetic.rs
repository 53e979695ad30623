//! The arithmetic on buffers that a step needs beside the operations of blocks and of update rules, as values: a memory
//! has one method for all of it, and what wraps a memory forwards one call.
//!
//! Every operation changes one range, the destination, which is not part of the value.

use super::slices::{Buffer, Slice, SliceMut};
use crate::dtype::DType;
use crate::exact::ExactSum;
use crate::scalars::{GradientFactors, SCALAR_WORDS};

/// An operation of [`Memory::compute`](super::Memory::compute). `S` is what it reads: a [`Slice`], or what a memory makes
/// of that.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arithmetic<'a, S> {
    /// Adds the source to the destination, element by element, in one dtype (bf16 and f16 are added in f32 and rounded;
    /// integers wrap).
    Accumulate(S),
    /// Multiplies every element by the factor, which is first rounded to the dtype; each product is rounded once (bf16
    /// and f16 are multiplied in f32 and rounded).
    Scale(f64),
    /// Adds the squares of all rows of the source to the words of an [`ExactSum`] (`I64`): each row is summed in `f64` in
    /// a fixed order, and the sums of rows are added exactly. Carries between words may be left unresolved. The rows
    /// differ between ranks, but every rank makes this one call; elements outside all rows are zero.
    SquareSum(S, &'a [Rows]),
    /// Adds all elements (`F64`) to the words of an [`ExactSum`] (`I64`).
    ExactSum(S),
    /// Adds whole numbers (`F64`) to the same number of words (`I64`), element by element.
    AddCounts(S),
    /// Computes [`GradientFactors`] (`F64`) from the reduced scalars of a step (`I64`, [`SCALAR_WORDS`]), as defined in
    /// [`StepReport::of`](crate::scalars::StepReport::of). On entry the destination holds those of the previous step: once a
    /// value was not finite, `finite` remains 0.
    GradientFactors {
        /// The reduced scalars.
        scalars: S,
        /// What the gradient was divided by.
        divisor: f64,
        /// The norm to clip to.
        grad_clip: Option<f64>,
    },
}

/// Rows of equal lengths within a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// First element.
    pub offset: usize,
    /// Number of elements, a multiple of `row_len`.
    pub len: usize,
    /// Number of elements of each row.
    pub row_len: usize,
}

impl<'a, S> Arithmetic<'a, S> {
    /// The same operation with what `source` makes of the source, if there is one.
    ///
    /// # Errors
    /// Those of `source`.
    pub fn try_map<T, E>(self, source: impl FnOnce(S) -> Result<T, E>) -> Result<Arithmetic<'a, T>, E> {
        Ok(match self {
            Self::Accumulate(src) => Arithmetic::Accumulate(source(src)?),
            Self::Scale(factor) => Arithmetic::Scale(factor),
            Self::SquareSum(src, rows) => Arithmetic::SquareSum(source(src)?, rows),
            Self::ExactSum(src) => Arithmetic::ExactSum(source(src)?),
            Self::AddCounts(src) => Arithmetic::AddCounts(source(src)?),
            Self::GradientFactors { scalars, divisor, grad_clip } => {
                Arithmetic::GradientFactors { scalars: source(scalars)?, divisor, grad_clip }
            }
        })
    }
}

impl<B: Buffer> Arithmetic<'_, Slice<'_, B>> {
    /// Checks the operands. A memory calls this before it computes; one that forwards the operation need not.
    ///
    /// # Panics
    /// When lengths or dtypes are not what the operation states.
    #[track_caller]
    pub fn check(&self, dst: &SliceMut<'_, B>) {
        let dst = dst.as_slice();
        match *self {
            Self::Accumulate(src) => expect("accumulated elements", src, dst.buffer.dtype(), dst.len),
            Self::Scale(_) => expect_float(dst),
            Self::SquareSum(src, rows) => {
                expect_float(src);
                rows.iter().for_each(|rows| rows.check(src.len));
                expect("words of an exact sum", dst, DType::I64, ExactSum::WORDS);
            }
            Self::ExactSum(src) => {
                expect("terms of an exact sum", src, DType::F64, src.len);
                expect("words of an exact sum", dst, DType::I64, ExactSum::WORDS);
            }
            Self::AddCounts(src) => {
                expect("counts", src, DType::F64, src.len);
                expect("words of counts", dst, DType::I64, src.len);
            }
            Self::GradientFactors { scalars, .. } => {
                expect("words of a step's scalars", scalars, DType::I64, SCALAR_WORDS);
                expect("gradient factors", dst, DType::F64, GradientFactors::LEN);
            }
        }
    }
}

impl Rows {
    #[track_caller]
    fn check(&self, available: usize) {
        let Self { offset, len, row_len } = *self;
        assert!(offset + len <= available, "rows at {offset}..{} of {available} elements", offset + len);
        assert!(
            row_len > 0 && len.is_multiple_of(row_len),
            "elements of rows: {len} is not a multiple of {row_len}"
        );
    }
}

#[track_caller]
fn expect<B: Buffer>(what: &str, slice: Slice<'_, B>, dtype: DType, len: usize) {
    let (found, found_len) = (slice.buffer.dtype(), slice.len);
    assert!(
        (found, found_len) == (dtype, len),
        "{what}: {found_len} of {found}, but {len} of {dtype} are needed"
    );
}

#[track_caller]
fn expect_float<B: Buffer>(slice: Slice<'_, B>) {
    let dtype = slice.buffer.dtype();
    assert!(dtype.is_float(), "this needs a float dtype, not {dtype}");
}
