//! Lookup of table rows, and its backward.

use fsdp_core::Error;

use super::experts::add_parts;
use crate::backend::Outcome;
use crate::host::HostMemory;
use crate::host::backend::Call;
use crate::host::element::{Element, Float};
use crate::host::floats::Target;
use crate::host::raw::vectorized;
use crate::host::workers::{Workers, task_rows};
use crate::op::Lookup;

impl HostMemory {
    pub(in crate::host) fn lookup<E: Element>(
        &self,
        op: &Lookup,
        operands: Call<'_, '_>,
    ) -> Result<Outcome, Error> {
        match *op {
            Lookup::Embedding { width, table_rows, .. } => {
                let ([ids, table], [y], _) = operands.split();
                let ids = self.elements(ids)?;
                check_ids(ids, table_rows)?;
                let (table, add) = (self.elements::<E>(table)?, y.accumulate);
                forward(self.workers(), width, ids, table, self.elements_mut(y.slice)?, add);
            }
            Lookup::EmbeddingBackward { width, table_rows, padding, .. } => {
                let ([ids, dy], [dtable], _) = operands.split();
                let ids = self.elements(ids)?;
                check_ids(ids, table_rows)?;
                let dy = self.elements::<E>(dy)?;
                backward(self.workers(), (width, padding), ids, dy, self.target(dtable)?);
            }
            Lookup::SumRows { terms, width, table_rows, .. } => {
                let ([ids, table], [y], _) = operands.split();
                let ids = self.elements(ids)?;
                check_ids(ids, table_rows + 1)?;
                let y = self.elements_mut::<E>(y.slice)?;
                sum_rows(self.workers(), (terms, width), ids, self.elements(table)?, y);
            }
            Lookup::Positions { .. } => return Ok(Outcome::Unsupported),
        }
        Ok(Outcome::Done)
    }
}

/// Checks that every id is a row of the table, as it is in a valid batch.
fn check_ids(ids: &[u32], table_rows: usize) -> Result<(), Error> {
    let other = ids.iter().find(|&&id| id as usize >= table_rows);
    assert_eq!(other, None, "a token id is not a row of an embedding table of {table_rows}");
    Ok(())
}

/// Sets row `i` of `y` to row `ids[i]` of `table`, or adds it.
fn forward<E: Element>(workers: &Workers, width: usize, ids: &[u32], table: &[E], y: &mut [E], add: bool) {
    let rows = task_rows(width);
    let tasks = y.chunks_mut(rows * width).zip(ids.chunks(rows));
    workers.each(tasks, |(y, ids)| {
        for (y, &id) in y.chunks_mut(width).zip(ids) {
            let row = &table[id as usize * width..][..width];
            if add { add_row(row, y) } else { y.copy_from_slice(row) }
        }
    });
}

/// Sets row `i` of `y` to the sum of some rows of `table`, in the order of the tree.
fn sum_rows<E: Element>(
    workers: &Workers,
    (terms, width): (usize, usize),
    ids: &[u32],
    table: &[E],
    y: &mut [E],
) {
    let rows = task_rows(terms * width);
    let tasks = y.chunks_mut(rows * width).zip(ids.chunks(rows * terms));
    workers.each(tasks, |(y, ids)| {
        let mut parts = vec![E::store(E::Acc::ZERO); terms * width];
        for (y, ids) in y.chunks_mut(width).zip(ids.chunks(terms)) {
            for (part, &id) in parts.chunks_mut(width).zip(ids) {
                match table.get(id as usize * width..(id as usize + 1) * width) {
                    Some(row) => part.copy_from_slice(row),
                    None => part.fill(E::store(E::Acc::ZERO)),
                }
            }
            add_parts(&mut parts, width);
            y.copy_from_slice(&parts[..width]);
        }
    });
}

vectorized! {
    fn add_row<E: Element>(row: &[E], y: &mut [E]) {
        for (y, value) in y.iter_mut().zip(row) {
            *y = E::store(y.load() + value.load());
        }
    }
}

vectorized! {
    fn sum_row<E: Element>(row: &[E], sum: &mut [E::Acc]) {
        for (sum, value) in sum.iter_mut().zip(row) {
            *sum += value.load();
        }
    }
}

/// Adds row `i` of `dy` to row `ids[i]` of the gradient. Rows of one id are summed in the order of `i`, and the sum
/// is added to the gradient once. Rows whose id is `padding` are left out.
fn backward<E: Element>(
    workers: &Workers,
    (width, padding): (usize, Option<usize>),
    ids: &[u32],
    dy: &[E],
    dtable: Target<'_>,
) {
    let numbered = ids.iter().copied().zip(0..);
    let mut order: Vec<(u32, u32)> = numbered.filter(|&(id, _)| Some(id as usize) != padding).collect();
    order.sort_unstable();
    let block_rows = 4 * task_rows(width);
    let tasks = dtable.parts(block_rows * width).enumerate();
    workers.each(tasks, |(block, mut rows)| {
        if !rows.accumulate {
            rows.clear();
        }
        let first = block * block_rows;
        let start = order.partition_point(|&(id, _)| (id as usize) < first);
        let end = order.partition_point(|&(id, _)| (id as usize) < first + block_rows);
        let mut sum = vec![E::Acc::ZERO; width];
        for group in order[start..end].chunk_by(|a, b| a.0 == b.0) {
            sum.fill(E::Acc::ZERO);
            for &(_, i) in group {
                sum_row(&dy[i as usize * width..][..width], &mut sum);
            }
            rows.put((group[0].0 as usize - first) * width, &sum);
        }
    });
}
