//! The receipts of the writers, and the proof that they add up to the plan.

use std::{collections::BTreeMap, ops::Range, path::PathBuf};

use serde::{Deserialize, Serialize};

use super::ExportPlan;
use crate::{digest::Digest, error::Error, ranges::first_coverage_fault};

/// The elements that one writer has written and made durable. Serializable, for writers in other processes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[must_use = "a commit needs the receipts of all writers"]
pub struct Receipt {
    path: PathBuf,
    plan: Digest,
    written: Vec<Written>,
}

/// A range of elements of one tensor, in one file of the plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Written {
    file: usize,
    tensor: usize,
    first: u64,
    end: u64,
}

impl Receipt {
    pub(super) fn new(plan: &ExportPlan) -> Receipt {
        Receipt { path: plan.path().to_owned(), plan: plan.digest(), written: Vec::new() }
    }

    /// Records elements. A range that continues the previous one extends it.
    pub(super) fn note(&mut self, (file, tensor): (usize, usize), elements: Range<u64>) {
        if elements.is_empty() {
            return;
        }
        match self.written.last_mut() {
            Some(last) if (last.file, last.tensor, last.end) == (file, tensor, elements.start) => {
                last.end = elements.end;
            }
            _ => self.written.push(Written { file, tensor, first: elements.start, end: elements.end }),
        }
    }
}

/// Proves that the receipts cover every element of the plan exactly once.
pub(super) fn check(plan: &ExportPlan, receipts: impl IntoIterator<Item = Receipt>) -> Result<(), Error> {
    let mut written: BTreeMap<(usize, usize), Vec<Range<u64>>> = BTreeMap::new();
    for receipt in receipts {
        if receipt.plan != plan.digest() {
            let got = receipt.path.display();
            return Err(Error::unplanned(plan.path(), format!("its commit was given a receipt for {got}")));
        }
        for Written { file, tensor, first, end } in receipt.written {
            written.entry((file, tensor)).or_default().push(first..end);
        }
    }
    for (file, planned) in plan.files().iter().enumerate() {
        for (tensor, entry) in
            planned.header.entries().iter().enumerate().filter(|(_, entry)| entry.len_bytes() > 0)
        {
            let runs = written.remove(&(file, tensor)).unwrap_or_default();
            let len = entry.row_count() as u64 * entry.row_len();
            let uneven = first_coverage_fault(len, runs.into_iter().map(|run| (run, ())));
            let Some((elements, holders)) = uneven else { continue };
            let rows = elements.start / entry.row_len()..elements.end.div_ceil(entry.row_len());
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
