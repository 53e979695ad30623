//! Lookup of table rows.

use fsdp_nn::op::Lookup;

use super::Call;
use crate::hlo::Element;
use crate::trace::Trace;

impl Trace {
    pub(super) fn lookup(&mut self, op: Lookup, operands: Call<'_, '_>) {
        match op {
            Lookup::Embedding { width, .. } => {
                let ([ids, table], [y], _) = operands.split();
                let (ids, table) = (self.read(ids), self.read_rows(table, width));
                let rows = self.hlo.gather_rows(&table, &ids);
                let rows = self.hlo.master(&rows);
                self.write(&y, &rows);
            }
            Lookup::EmbeddingBackward { width, table_rows, .. } => {
                let ([ids, dy], [dtable], _) = operands.split();
                let (ids, dy) = (self.read(ids), self.read_rows_master(dy, width));
                let table = self.hlo.zeros(&[table_rows, width], dy.element());
                let table = self.hlo.add_to_rows(&table, &ids, &dy);
                self.write(&dtable, &table);
            }
            Lookup::Positions { samples, seq } => {
                let ([], [ids], _) = operands.split();
                let positions = self.hlo.iota(&[samples, seq], 1, Element::U32);
                self.write(&ids, &positions);
            }
        }
    }
}
