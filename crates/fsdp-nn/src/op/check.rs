//! The one place where operands are checked against what an operation reads and writes.

use fsdp_core::DType;
use fsdp_core::memory::Buffer;

use super::{Access, AttentionDims, Kind, Op, Role};
use crate::backend::Operands;
use crate::lengths;

impl Op {
    /// Checks operands: their number, lengths and types, and sizes that must divide each other.
    ///
    /// # Panics
    /// When they do not fit, which only a bug of ours can cause; it names operation and operand.
    pub fn check<B: Buffer>(&self, operands: &Operands<'_, '_, B>) {
        self.check_sizes();
        lengths::expect("dropout keys", operands.keys.len(), self.key_count());
        let signature = self.signature();
        lengths::expect("operands that are read", operands.reads.len(), signature.reads.len());
        lengths::expect("operands that are written", operands.writes.len(), signature.writes.len());
        let reads = operands.reads.iter().map(|slice| (slice.len, slice.buffer.dtype(), false));
        let writes = operands
            .writes
            .iter()
            .map(|write| (write.slice.len, write.slice.buffer.dtype(), write.accumulate));
        let roles = signature.reads.iter().chain(&signature.writes);
        let found: Vec<(&Role, (usize, DType, bool))> = roles.zip(reads.chain(writes)).collect();
        let value = found.iter().find(|(role, _)| role.kind == Kind::Value).map(|(_, (_, dtype, _))| *dtype);
        found.into_iter().for_each(|(role, got)| self.check_operand(role, got, value));
    }

    fn check_operand(
        &self,
        role: &Role,
        (len, dtype, accumulate): (usize, DType, bool),
        value: Option<DType>,
    ) {
        let operand = || format!("{} of {}", role.name, self.name());
        let fits = len == role.len || role.or_more && len > role.len;
        let least = if role.or_more { " at least" } else { "" };
        assert!(fits, "{}: {len} elements, but {} are needed{least}", operand(), role.len);
        // Copies and sums are those of the memory, which also converts.
        let copies = matches!(self, Op::Copy { .. });
        let expected = match (role.kind, value) {
            (Kind::Of(expected), _) => expected,
            (Kind::Value, Some(value)) if !copies => value,
            (Kind::Statistic, Some(value)) => value.master(),
            _ => dtype,
        };
        let may_be_any = copies || !matches!(role.kind, Kind::Value | Kind::Gradient);
        assert!(may_be_any || dtype.is_float(), "{}: this needs a float dtype, not {dtype}", operand());
        assert!(dtype == expected, "{}: {dtype}, where the other operands need {expected}", operand());
        let may_add = role.access == Access::Add;
        assert!(!accumulate || may_add, "{}: it is overwritten, and can not be added to", operand());
    }

    fn check_sizes(&self) {
        let shares = |dims: AttentionDims| {
            let is_even = dims.kv_heads > 0 && dims.heads.is_multiple_of(dims.kv_heads);
            assert!(is_even, "{} query heads do not share {} key heads evenly", dims.heads, dims.kv_heads);
        };
        match self {
            Op::Linear { dims, .. }
            | Op::LinearBackwardInput { dims }
            | Op::LinearBackwardWeight { dims } => {
                let (stride, outputs) = (dims.y_stride, dims.outputs);
                assert!(stride >= outputs, "rows of {outputs} elements do not lie {stride} apart");
            }
            Op::Attention { dims, .. } | Op::AttentionBackward { dims, .. } => shares(*dims),
            Op::Rope { dims, inverse_frequencies, .. } => {
                lengths::expect_rows("elements of a rotated head", 2, dims.head_dim);
                lengths::expect("inverse frequencies", inverse_frequencies.len(), dims.head_dim / 2);
                shares(*dims);
            }
            Op::Dropout { len, samples, .. } => {
                lengths::expect_rows("elements of samples under dropout", *samples, *len);
            }
            _ => {}
        }
    }
}
