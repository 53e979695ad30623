//! [`Arithmetic`] as operations of a program.

use fsdp_core::memory::{Arithmetic, Slice, SliceMut};
use fsdp_core::scalars::GradientFactors;
use fsdp_core::{DType, Queue};

use crate::buffer::XlaBuffer;
use crate::scalars;
use crate::trace::Trace;

/// Adds an operation to a program.
pub(crate) fn trace(
    trace: &mut Trace,
    queue: Queue,
    operation: Arithmetic<'_, Slice<'_, XlaBuffer>>,
    dst: &SliceMut<'_, XlaBuffer>,
) {
    let before = trace.load(queue, dst.as_slice());
    let after = match operation {
        Arithmetic::Accumulate(src) => {
            let addend = trace.load(queue, src);
            let (sum, addend) = (trace.hlo.master(&before), trace.hlo.master(&addend));
            trace.hlo.add(&sum, &addend)
        }
        Arithmetic::Scale(factor) => trace.hlo.with("multiply", &before, factor),
        Arithmetic::SquareSum(src, rows) => {
            // Elements outside the rows are zero, so only whether this rank has any matters, not where they are.
            let counts = trace.input_floats(&[f64::from(u8::from(!rows.is_empty()))], DType::F64.into());
            let src = trace.load(queue, src);
            let squares = scalars::square_sum(&mut trace.hlo, &src);
            let counts = trace.hlo.reshape(&counts, &[]);
            let squares = trace.hlo.multiply(&squares, &counts);
            scalars::add_exactly(&mut trace.hlo, &before, &squares)
        }
        Arithmetic::ExactSum(src) => {
            let numbers = trace.load(queue, src);
            let total = trace.hlo.sum(&numbers, &[0]);
            scalars::add_exactly(&mut trace.hlo, &before, &total)
        }
        Arithmetic::AddCounts(src) => {
            let counts = trace.load(queue, src);
            let counts = trace.hlo.convert(&counts, before.element());
            trace.hlo.add(&before, &counts)
        }
        Arithmetic::GradientFactors { scalars: src, divisor, grad_clip } => {
            let words = trace.load(queue, src);
            // An argument of the program, so that the program is the same for all loss scales.
            let divisor = trace.input_floats(&[divisor], DType::F64.into());
            let after = scalars::gradient_factors(&mut trace.hlo, &words, &before, &divisor, grad_clip);
            assert_eq!(after.len(), GradientFactors::LEN, "all factors are computed");
            after
        }
    };
    trace.store(queue, dst, &after);
}
