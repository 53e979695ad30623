//! [`Arithmetic`] on the host.

use fsdp_core::memory::{Arithmetic, Buffer, Rows, Slice, SliceMut};
use fsdp_core::scalars::GradientFactors;
use fsdp_core::{DType, Error, ExactSum};

use super::buffer::HostBuffer;
use super::element::{Element, Scalar, for_float};
use super::floats::{add, multiply};
use super::math;
use super::memory::HostMemory;
use super::raw::vectorized;
use super::workers::{TASK_ELEMS, task_rows};

type In<'a> = Slice<'a, HostBuffer>;
type Out<'a> = SliceMut<'a, HostBuffer>;

impl HostMemory {
    /// Runs an operation.
    pub(super) fn arithmetic(&self, operation: Arithmetic<'_, In<'_>>, dst: Out<'_>) -> Result<(), Error> {
        operation.check(&dst);
        match operation {
            Arithmetic::Accumulate(src) => match dst.buffer.dtype() {
                DType::U32 => self.accumulate_integers(src, dst, u32::wrapping_add)?,
                DType::I64 => self.accumulate_integers(src, dst, i64::wrapping_add)?,
                float => for_float!(float, E => self.accumulate_floats::<E>(src, dst)?),
            },
            Arithmetic::Scale(factor) => for_float!(dst.buffer.dtype(), E => {
                let factor = E::from_f64(factor).load();
                let tasks = self.elements_mut::<E>(dst)?.chunks_mut(TASK_ELEMS);
                self.workers().each(tasks, |elements| multiply(elements, factor));
            }),
            Arithmetic::SquareSum(src, rows) => {
                for_float!(src.buffer.dtype(), E => self.add_squares::<E>(src, rows, dst)?);
            }
            Arithmetic::ExactSum(src) => {
                let (src, words) = (self.elements::<f64>(src)?, self.elements_mut(dst)?);
                let mut sum = ExactSum::from_words(words);
                src.iter().for_each(|&value| sum.add(value));
                words.copy_from_slice(&sum.to_words());
            }
            Arithmetic::AddCounts(src) => {
                let (src, words) = (self.elements::<f64>(src)?, self.elements_mut::<i64>(dst)?);
                words.iter_mut().zip(src).for_each(|(word, &count)| *word += count as i64);
            }
            Arithmetic::GradientFactors { scalars, divisor, grad_clip } => {
                let (words, factors) = (self.elements(scalars)?, self.elements_mut::<f64>(dst)?);
                let was_finite = GradientFactors::from_array([factors[0], factors[1], factors[2]]).finite;
                let after = GradientFactors::of(words, divisor, grad_clip, was_finite);
                factors.copy_from_slice(&after.to_array());
            }
        }
        Ok(())
    }

    fn accumulate_floats<E: Element>(&self, src: In<'_>, dst: Out<'_>) -> Result<(), Error> {
        let src = self.elements::<E>(src)?;
        let dst = self.elements_mut::<E>(dst)?;
        let tasks = dst.chunks_mut(TASK_ELEMS).zip(src.chunks(TASK_ELEMS));
        self.workers().each(tasks, |(dst, src)| add(src, dst));
        Ok(())
    }

    fn accumulate_integers<T: Scalar>(
        &self,
        src: In<'_>,
        dst: Out<'_>,
        add: impl Fn(T, T) -> T,
    ) -> Result<(), Error> {
        let src = self.elements::<T>(src)?;
        let dst = self.elements_mut::<T>(dst)?;
        dst.iter_mut().zip(src).for_each(|(dst, &src)| *dst = add(*dst, src));
        Ok(())
    }

    fn add_squares<E: Element>(&self, src: In<'_>, rows: &[Rows], dst: Out<'_>) -> Result<(), Error> {
        let (src, words) = (self.elements::<E>(src)?, self.elements_mut(dst)?);
        let mut sum = ExactSum::from_words(words);
        for &Rows { offset, len, row_len } in rows {
            let tasks = src[offset..][..len].chunks(row_len * task_rows(row_len));
            let squares = self
                .workers()
                .map(tasks, |task| task.chunks(row_len).map(square_sum_of::<E>).collect::<Vec<f64>>());
            squares.iter().flatten().for_each(|&row| sum.add(row));
        }
        words.copy_from_slice(&sum.to_words());
        Ok(())
    }
}

vectorized! {
    /// Returns the sum of squares in double precision.
    fn square_sum_of<E: Element>(row: &[E]) -> f64 {
        math::sum1(row, |value| value.to_f64() * value.to_f64())
    }
}
