//! Checks operands against the description of their operation; the only place that does.

use fsdp_core::DType;
use fsdp_core::memory::Buffer;

use super::{Access, Description, Kind, Op, Pointwise, Role};
use crate::backend::{BatchFacts, Operands};
use crate::lengths;

impl Op {
    /// Checks operands: their number, lengths and dtypes, and sizes that must divide each other.
    ///
    /// # Panics
    /// If they do not fit, which is a bug in this project; the message names the operation and the operand.
    pub fn check<B: Buffer>(&self, operands: &Operands<'_, '_, B>) {
        let description = self.describe();
        let BatchFacts { keys, documents, lengths, .. } = operands.batch;
        lengths::expect("dropout keys", keys.len(), description.keys);
        if description.document_rows > 0 {
            let end = documents.iter().try_fold(0, |end, rows| (rows.start == end).then_some(rows.end));
            let rows = description.document_rows;
            assert_eq!(end, Some(rows), "{}: documents follow one another to the last row", description.name);
        }
        if description.counted_rows > 0 {
            let samples = lengths.len().max(1);
            let fits = description.counted_rows.is_multiple_of(samples)
                && lengths.iter().all(|&length| length <= description.counted_rows / samples);
            assert!(
                fits && !lengths.is_empty(),
                "{}: samples count as far as they have rows",
                description.name
            );
        }
        let Description { name, reads: read, writes: written, .. } = &description;
        lengths::expect("operands that are read", operands.reads.len(), read.len());
        lengths::expect("operands that are written", operands.writes.len(), written.len());
        let reads = operands.reads.iter().map(|slice| (slice.len, slice.buffer.dtype(), false));
        let writes = operands
            .writes
            .iter()
            .map(|write| (write.slice.len, write.slice.buffer.dtype(), write.accumulate));
        let roles = read.iter().chain(written);
        let pairs: Vec<(&Role, (usize, DType, bool))> = roles.zip(reads.chain(writes)).collect();
        let value = pairs.iter().find(|(role, _)| role.kind == Kind::Value).map(|(_, (_, dtype, _))| *dtype);
        pairs.into_iter().for_each(|(role, got)| self.check_operand(name, role, got, value));
    }

    fn check_operand(
        &self,
        name: &str,
        role: &Role,
        (len, dtype, accumulate): (usize, DType, bool),
        value: Option<DType>,
    ) {
        let operand = || format!("{} of {name}", role.name);
        let fits = len == role.len || role.or_more && len > role.len;
        let suffix = if role.or_more { " at least" } else { "" };
        assert!(fits, "{}: {len} elements, but {} are needed{suffix}", operand(), role.len);
        // The memory runs copies, and also converts dtypes.
        let copies = matches!(self, Op::Pointwise(Pointwise::Copy { .. } | Pointwise::Convert { .. }));
        let expected = match (role.kind, value) {
            (Kind::Of(expected), _) => expected,
            (Kind::Value, Some(value)) if !copies => value,
            (Kind::Statistic, Some(value)) => value.master(),
            _ => dtype,
        };
        let accepts_any_dtype = copies || !matches!(role.kind, Kind::Value | Kind::Gradient);
        assert!(
            accepts_any_dtype || dtype.is_float(),
            "{}: this needs a float dtype, not {dtype}",
            operand()
        );
        assert!(dtype == expected, "{}: {dtype}, where the other operands need {expected}", operand());
        let accepts_addition = role.access == Access::Add;
        assert!(!accumulate || accepts_addition, "{}: it is overwritten, and cannot be added to", operand());
    }
}
