//! The receipts of the writers, and the proof that they add up to the plan.

use std::{collections::BTreeMap, ops::Range, path::PathBuf};

use serde::{Deserialize, Serialize};

use super::ExportPlan;
use crate::{digest::Digest, error::Error, ranges::first_coverage_fault};

/// The rows that one writer has written and made durable. Serializable, for writers in other processes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[must_use = "a commit needs the receipts of all writers"]
pub struct Receipt {
    path: PathBuf,
    plan: Digest,
    written: Vec<WrittenRows>,
}

/// A range of rows of one tensor, in one file of the plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct WrittenRows {
    file: usize,
    tensor: usize,
    first: usize,
    end: usize,
}

impl Receipt {
    pub(super) fn new(plan: &ExportPlan) -> Receipt {
        Receipt { path: plan.path().to_owned(), plan: plan.digest(), written: Vec::new() }
    }

    /// Records rows. A range that continues the previous one extends it.
    pub(super) fn note(&mut self, (file, tensor): (usize, usize), rows: Range<usize>) {
        if rows.is_empty() {
            return;
        }
        match self.written.last_mut() {
            Some(last) if (last.file, last.tensor, last.end) == (file, tensor, rows.start) => {
                last.end = rows.end;
            }
            _ => self.written.push(WrittenRows { file, tensor, first: rows.start, end: rows.end }),
        }
    }
}

/// Proves that the receipts cover every row of the plan exactly once.
pub(super) fn check(plan: &ExportPlan, receipts: impl IntoIterator<Item = Receipt>) -> Result<(), Error> {
    let mut written: BTreeMap<(usize, usize), Vec<Range<u64>>> = BTreeMap::new();
    for receipt in receipts {
        if receipt.plan != plan.digest() {
            let got = receipt.path.display();
            return Err(Error::unplanned(plan.path(), format!("its commit was given a receipt for {got}")));
        }
        for WrittenRows { file, tensor, first, end } in receipt.written {
            written.entry((file, tensor)).or_default().push(first as u64..end as u64);
        }
    }
    for (file, planned) in plan.files().iter().enumerate() {
        for (tensor, entry) in
            planned.header.entries().iter().enumerate().filter(|(_, entry)| entry.len_bytes() > 0)
        {
            let runs = written.remove(&(file, tensor)).unwrap_or_default();
            let uneven =
                first_coverage_fault(entry.row_count() as u64, runs.into_iter().map(|run| (run, ())));
            let Some((rows, holders)) = uneven else { continue };
            let what = match holders {
                None => "were never written; every row needs one writer before the commit",
                Some(_) => "were written more than once; every row needs exactly one writer",
            };
            let reason = format!("rows {}..{} of tensor `{}` {what}", rows.start, rows.end, entry.name());
            return Err(Error::unplanned(&planned.path, reason));
        }
    }
    Ok(())
}
