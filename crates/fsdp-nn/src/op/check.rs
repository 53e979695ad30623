//! The one place where operands are checked against what an operation reads and writes.

use fsdp_core::memory::Buffer;
use fsdp_core::{DType, Error};

use super::{Access, AttentionDims, Kind, Op, Role};
use crate::backend::Operands;
use crate::lengths;

impl Op {
    /// Checks operands: their number, lengths and types, and sizes that must divide each other.
    ///
    /// # Errors
    /// [`Error::Memory`], which names operation and operand.
    pub fn check<B: Buffer>(&self, operands: &Operands<'_, '_, B>) -> Result<(), Error> {
        self.check_sizes()?;
        lengths::expect("dropout keys", operands.keys.len(), self.key_count())?;
        let signature = self.signature();
        lengths::expect("operands that are read", operands.reads.len(), signature.reads.len())?;
        lengths::expect("operands that are written", operands.writes.len(), signature.writes.len())?;
        let reads = operands.reads.iter().map(|slice| (slice.len, slice.buffer.dtype(), false));
        let writes = operands
            .writes
            .iter()
            .map(|write| (write.slice.len, write.slice.buffer.dtype(), write.accumulate));
        let roles = signature.reads.iter().chain(&signature.writes);
        let found: Vec<(&Role, (usize, DType, bool))> = roles.zip(reads.chain(writes)).collect();
        let value = found.iter().find(|(role, _)| role.kind == Kind::Value).map(|(_, (_, dtype, _))| *dtype);
        found.into_iter().try_for_each(|(role, got)| self.check_operand(role, got, value))
    }

    fn check_operand(
        &self,
        role: &Role,
        (len, dtype, accumulate): (usize, DType, bool),
        value: Option<DType>,
    ) -> Result<(), Error> {
        let fail = |what: String| {
            let what = format!("{} of {}: {what}", role.name, self.name());
            Err(Error::Memory { category: None, what })
        };
        if len != role.len && !(role.or_more && len > role.len) {
            let least = if role.or_more { " at least" } else { "" };
            return fail(format!("{len} elements, but {} are needed{least}", role.len));
        }
        // Copies and sums are those of the memory, which also converts.
        let copies = matches!(self, Op::Copy { .. });
        let expected = match (role.kind, value) {
            (Kind::Of(expected), _) => Some(expected),
            (Kind::Value, Some(value)) if !copies => Some(value),
            (Kind::Statistic, Some(value)) => Some(value.master()),
            _ => None,
        };
        if matches!(role.kind, Kind::Value | Kind::Gradient) && !dtype.is_float() && !copies {
            return fail(format!("this needs a float dtype, not {dtype}"));
        }
        if expected.is_some_and(|expected| expected != dtype) {
            return fail(format!("{dtype}, where the other operands need {}", expected.unwrap_or(dtype)));
        }
        if accumulate && role.access != Access::Add {
            return fail("it is overwritten, and can not be added to".into());
        }
        Ok(())
    }

    fn check_sizes(&self) -> Result<(), Error> {
        let shares = |dims: AttentionDims| {
            if dims.kv_heads > 0 && dims.heads.is_multiple_of(dims.kv_heads) {
                return Ok(());
            }
            let what = format!("{} query heads do not share {} key heads evenly", dims.heads, dims.kv_heads);
            Err(Error::Memory { category: None, what })
        };
        match self {
            Op::Linear { dims, .. }
            | Op::LinearBackwardInput { dims }
            | Op::LinearBackwardWeight { dims }
                if dims.y_stride < dims.outputs =>
            {
                lengths::expect("elements of a row of a linear map", dims.y_stride, dims.outputs)
            }
            Op::Attention { dims, .. } | Op::AttentionBackward { dims, .. } => shares(*dims),
            Op::Rope { dims, inverse_frequencies, .. } => {
                lengths::expect_rows("elements of a rotated head", 2, dims.head_dim)?;
                lengths::expect("inverse frequencies", inverse_frequencies.len(), dims.head_dim / 2)?;
                shares(*dims)
            }
            Op::Dropout { len, samples, .. } => {
                lengths::expect_rows("elements of samples under dropout", *samples, *len)
            }
            _ => Ok(()),
        }
    }
}
