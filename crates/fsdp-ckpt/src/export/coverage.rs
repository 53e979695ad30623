//! Which rows were written: receipts of the writers, and the proof that they add up to the plan.

use std::{ops::Range, path::PathBuf};

use serde::{Deserialize, Serialize};

use super::ExportPlan;
use crate::{digest::Digest, error::Error};

/// What one writer has written, made durable. Writers in other processes serialize it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[must_use = "a commit needs the receipts of all writers"]
pub struct Receipt {
    path: PathBuf,
    plan: Digest,
    written: Vec<WrittenRows>,
}

/// Rows of one tensor.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
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

    /// Notes rows; a run that continues the last one extends it.
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
    let mut written = Vec::new();
    for receipt in receipts {
        if receipt.plan != plan.digest() {
            let (expected, got) = (plan.path().to_owned(), receipt.path);
            return Err(Error::ForeignReceipt { expected, got });
        }
        written.extend(receipt.written);
    }
    written.sort();
    let mut written = written.into_iter().peekable();
    for (file, planned) in plan.files().iter().enumerate() {
        for (tensor, entry) in planned.header.entries().iter().enumerate() {
            let path = || planned.path.clone();
            let name = || entry.name().to_owned();
            let mut covered = 0;
            while let Some(run) = written.next_if(|run| (run.file, run.tensor) == (file, tensor)) {
                if run.first < covered {
                    let rows = run.first..run.end.min(covered);
                    return Err(Error::RowsWrittenTwice { path: path(), tensor: name(), rows });
                }
                if run.first > covered {
                    let rows = covered..run.first;
                    return Err(Error::RowsNotWritten { path: path(), tensor: name(), rows });
                }
                covered = run.end;
            }
            if covered < entry.row_count() && entry.len_bytes() > 0 {
                let rows = covered..entry.row_count();
                return Err(Error::RowsNotWritten { path: path(), tensor: name(), rows });
            }
        }
    }
    Ok(())
}
