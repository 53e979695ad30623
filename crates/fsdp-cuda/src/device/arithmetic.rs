//! [`Arithmetic`] as kernels, or on the host if all operands are in pinned memory.

use fsdp_core::memory::{Arithmetic, Buffer, Memory, Rows};
use fsdp_core::{DType, Error, Queue};

use super::buffer::{In, Out, host_slice, host_slice_mut};
use super::memory::CudaMemory;
use crate::kernels::{Arg, CONVERT, EXACT, INTEGERS};

/// Threads per block of the kernels for exact sums.
const EXACT_THREADS: u32 = 256;

impl CudaMemory {
    /// Runs an operation.
    pub(super) fn arithmetic(
        &self,
        queue: Queue,
        operation: Arithmetic<'_, In<'_>>,
        mut dst: Out<'_>,
    ) -> Result<(), Error> {
        operation.check(&dst);
        if let (true, Ok(operation)) =
            (dst.buffer.is_on_host(), operation.try_map(|src| host_slice(&src).ok_or(())))
        {
            return self.host_after(queue)?.compute(queue, operation, host_slice_mut(dst));
        }
        let (dtype, len) = (dst.buffer.dtype(), dst.len);
        match operation {
            Arithmetic::Accumulate(src) => {
                let (source, kernel) = match dtype {
                    DType::U32 => (&INTEGERS, "accumulate_u32"),
                    DType::I64 => (&INTEGERS, "accumulate_i64"),
                    _ => (&CONVERT, "accumulate"),
                };
                let args = self.elementwise_args(queue, src, dst)?;
                self.kernels(queue, source, (dtype, dtype)).elements(kernel, len, &args)?;
            }
            Arithmetic::Scale(factor) => {
                let args = [Arg::Range(self.range_mut(queue, dst)?), Arg::Len(len), Arg::Double(factor)];
                self.kernels(queue, &CONVERT, (dtype, dtype)).elements("scale", len, &args)?;
            }
            Arithmetic::SquareSum(src, rows) => {
                rows.iter().try_for_each(|rows| self.add_squares(queue, src, *rows, dst.reborrow()))?;
            }
            Arithmetic::ExactSum(src) => self.add_each("exact_sum", queue, src, dst)?,
            Arithmetic::AddCounts(src) => self.add_each("add_counts", queue, src, dst)?,
            Arithmetic::GradientFactors { scalars, divisor, grad_clip } => {
                let args = [
                    Arg::Range(self.range(queue, scalars)?),
                    Arg::Range(self.range_mut(queue, dst)?),
                    Arg::Double(divisor),
                    Arg::Int(u32::from(grad_clip.is_some())),
                    Arg::Double(grad_clip.unwrap_or(0.0)),
                ];
                self.kernels(queue, &EXACT, (DType::F64, DType::F64)).blocks(
                    "gradient_factors",
                    (1, 1),
                    1,
                    &args,
                )?;
            }
        }
        Ok(())
    }

    fn add_squares(&self, queue: Queue, src: In<'_>, rows: Rows, sum: Out<'_>) -> Result<(), Error> {
        let Rows { offset, len, row_len } = rows;
        let (dtype, count) = (src.buffer.dtype(), len / row_len);
        let args = [
            Arg::Range(self.range(queue, src.part(offset, len))?),
            Arg::Range(self.range_mut(queue, sum)?),
            Arg::Len(row_len),
            Arg::Len(count),
        ];
        // A warp handles a row, or 32 of them if rows are single elements.
        let rows_per_block = if row_len == 1 { EXACT_THREADS } else { EXACT_THREADS / 32 };
        let blocks = count.div_ceil(rows_per_block as usize);
        let kernels = self.kernels(queue, &EXACT, (dtype, dtype));
        Ok(kernels.striding("square_sum", blocks, EXACT_THREADS, &args)?)
    }

    /// Runs a kernel with a thread for every element of `src` (`F64`).
    fn add_each(&self, kernel: &'static str, queue: Queue, src: In<'_>, dst: Out<'_>) -> Result<(), Error> {
        let blocks = src.len.div_ceil(EXACT_THREADS as usize);
        let args = self.elementwise_args(queue, src, dst)?;
        let kernels = self.kernels(queue, &EXACT, (DType::F64, DType::F64));
        Ok(kernels.striding(kernel, blocks, EXACT_THREADS, &args)?)
    }
}
