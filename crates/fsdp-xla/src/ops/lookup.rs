//! Lookup of table rows.

use fsdp_nn::op::Lookup;

use super::Call;
use crate::hlo::{Element, Value};
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
            Lookup::EmbeddingBackward { width, table_rows, padding, .. } => {
                let ([ids, dy], [dtable], _) = operands.split();
                let (ids, dy) = (self.read(ids), self.read_rows_master(dy, width));
                let table = self.hlo.zeros(&[table_rows, width], dy.element());
                let ids = padding.map_or(ids.clone(), |row| self.leave_out(&ids, row, table_rows));
                let table = self.hlo.add_to_rows(&table, &ids, &dy);
                self.write(&dtable, &table);
            }
            Lookup::SumRows { .. } => unreachable!("rows are gathered where routes cannot be read"),
            Lookup::Positions { samples, seq } => {
                let ([], [ids], _) = operands.split();
                let positions = self.hlo.iota(&[samples, seq], 1, Element::U32);
                self.write(&ids, &positions);
            }
        }
    }

    /// Replaces the ids of one row by the index past the end, whose rows a scatter drops.
    fn leave_out(&mut self, ids: &Value, row: usize, table_rows: usize) -> Value {
        let [row, past] =
            [row, table_rows].map(|number| self.hlo.int(number as i64, ids.dims(), ids.element()));
        let is_row = self.hlo.compare("EQ", ids, &row);
        self.hlo.select(&is_row, &past, ids)
    }
}
