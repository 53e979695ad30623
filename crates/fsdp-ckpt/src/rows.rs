//! Checks of row arguments: whether the rows exist, and whether a buffer matches them.

use std::{ops::Range, path::Path};

use crate::error::Error;

/// Refuses rows that a tensor of `row_count` rows does not have.
pub(crate) fn expect_rows(
    path: &Path,
    tensor: &str,
    rows: &Range<usize>,
    row_count: usize,
) -> Result<(), Error> {
    if rows.start <= rows.end && rows.end <= row_count {
        return Ok(());
    }
    let Range { start, end } = rows;
    let reason = format!("rows {start}..{end} of tensor `{tensor}` do not exist: it has {row_count} rows");
    Err(Error::bad_request(path, reason))
}

/// Refuses a buffer that does not match the requested rows exactly. `unit` is `"bytes"` or `"elements"`.
pub(crate) fn expect_len(
    path: &Path,
    tensor: &str,
    unit: &str,
    expected: u64,
    got: u64,
) -> Result<(), Error> {
    if expected == got {
        return Ok(());
    }
    let reason =
        format!("{expected} {unit} were expected for rows of tensor `{tensor}`, the buffer has {got}");
    Err(Error::bad_request(path, reason))
}

/// Returns the number of rows in a buffer of `got` units; an error if they are not whole rows of `row` units.
pub(crate) fn whole_rows(path: &Path, tensor: &str, unit: &str, got: u64, row: u64) -> Result<usize, Error> {
    let is_whole = if row == 0 { got == 0 } else { got.is_multiple_of(row) };
    if is_whole {
        return Ok(got.checked_div(row).unwrap_or(0) as usize);
    }
    let reason = format!(
        "a multiple of {row} {unit} was expected for rows of tensor `{tensor}`, the buffer has {got}"
    );
    Err(Error::bad_request(path, reason))
}
