//! Consecutive records of a file, as they are read.

use serde_json::Value;

use crate::error::DataError;
use crate::files::DataFile;
use crate::record::{Fields, Record, RecordPosition, odd};

/// Maximum size of a line or a compressed document. Anything longer is not training text, but a damaged file or one
/// made to exhaust memory.
pub(super) const RECORD_BYTES_MAX: u64 = 1 << 30;

/// Maximum number of values in the lists of a row. Each takes some 40 bytes of memory while its row is read, but equal values take
/// no space in a file.
pub(super) const ROW_VALUES_MAX: u64 = 1 << 24;

/// Size of lines or rows, in bytes, from which a batch is full.
pub(super) const BATCH_BYTES: usize = 1 << 17;

/// Memory of a row besides its text, in bytes: its record, and its document.
pub(super) const ROW_BYTES: usize = 128;

/// Number of rows from which a batch is full, however short they are.
pub(super) const BATCH_ROWS: usize = 1 << 12;

/// Consecutive records of a file.
#[derive(Debug)]
pub(crate) struct Batch {
    /// Index of the file.
    pub(crate) file: usize,
    /// The data as read.
    pub(super) content: Content,
    /// Bytes that the records after it are known to expand to.
    pub(super) ahead: u64,
}

#[derive(Debug)]
pub(super) enum Content {
    /// A document that is a whole file.
    WholeFile(Vec<u8>),
    /// JSON lines, with the number of the first line.
    Lines { first: u64, bytes: Vec<u8> },
    /// Rows of a row group or of a file, with the number of the first row.
    Rows { group: Option<usize>, first: u64, records: Vec<Result<Record, String>>, bytes: usize },
}

/// Reasons why there is no record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RecordFault {
    /// The file is not UTF-8 from this byte on.
    NotText(usize),
    /// The record is malformed; describes how.
    Malformed(String),
}

/// A record, or what is wrong with it, and its position.
pub(crate) type PositionedRecord = (RecordPosition, Result<Record, RecordFault>);

impl Batch {
    /// Size of the contents, in bytes.
    pub(crate) fn len_bytes(&self) -> usize {
        match &self.content {
            Content::WholeFile(bytes) | Content::Lines { bytes, .. } => bytes.len(),
            Content::Rows { bytes, .. } => *bytes,
        }
    }

    /// Approximate size in memory, in bytes, which rows have even if they are empty or malformed.
    pub(crate) fn cost_bytes(&self) -> usize {
        let rows = if let Content::Rows { records, .. } = &self.content { records.len() } else { 0 };
        self.len_bytes() + rows * ROW_BYTES
    }

    /// Bytes that the records after this batch are known to expand to.
    pub(crate) fn ahead_bytes(&self) -> u64 {
        self.ahead
    }

    /// Position of the first record.
    pub(crate) fn position(&self) -> RecordPosition {
        match self.content {
            Content::WholeFile(_) => RecordPosition::WholeFile,
            Content::Lines { first, .. } => RecordPosition::Line(first),
            Content::Rows { group, first, .. } => RecordPosition::Row { group, row: first },
        }
    }

    /// Truncates a document that is a whole file to at most `bytes_max` bytes, at a character boundary. Returns whether
    /// it was longer.
    pub(crate) fn cut(&mut self, bytes_max: usize) -> bool {
        let Content::WholeFile(bytes) = &mut self.content else { return false };
        if bytes.len() <= bytes_max {
            return false;
        }
        let is_start = |&at: &usize| bytes[at] & 0b1100_0000 != 0b1000_0000;
        let end = (0..=bytes_max).rev().take(4).find(is_start).unwrap_or(bytes_max);
        bytes.truncate(end);
        true
    }

    /// Calls `visit` with each record, in order. Blank lines are skipped.
    pub(crate) fn for_each(self, fields: &Fields, mut visit: impl FnMut(PositionedRecord)) {
        match self.content {
            Content::WholeFile(bytes) => {
                let text = String::from_utf8(bytes).map(Record::Text);
                let not_text = |fault: std::string::FromUtf8Error| fault.utf8_error().valid_up_to();
                visit((
                    RecordPosition::WholeFile,
                    text.map_err(|fault| RecordFault::NotText(not_text(fault))),
                ));
            }
            Content::Lines { first, bytes } => {
                let lines = bytes.split(|&byte| byte == b'\n').zip(first..);
                for (line, number) in lines.filter(|(line, _)| !line.trim_ascii().is_empty()) {
                    visit((RecordPosition::Line(number), fields.parse(line).map_err(RecordFault::Malformed)));
                }
            }
            Content::Rows { group, first, records, .. } => {
                for (record, row) in records.into_iter().zip(first..) {
                    visit((RecordPosition::Row { group, row }, record.map_err(RecordFault::Malformed)));
                }
            }
        }
    }
}

/// Iterator over the batches of a file.
pub(crate) type Batches = Box<dyn Iterator<Item = Result<Batch, DataError>> + Send>;

/// Checks the size of the record of a row.
///
/// # Errors
/// If it is larger than a record may be.
pub(super) fn check_row(
    record: &Result<Record, String>,
    position: RecordPosition,
    file: &DataFile,
) -> Result<(), DataError> {
    let bytes = record.as_ref().map_or(0, Record::len_bytes);
    if bytes as u64 <= RECORD_BYTES_MAX {
        return Ok(());
    }
    let reason = format!(
        "{position}: it has {bytes} bytes; the maximum for a row is {RECORD_BYTES_MAX}: split the document"
    );
    Err(DataError::Malformed { file: file.path.clone(), reason })
}

/// Returns the value of a column, which has a JSON form.
///
/// # Errors
/// A description that names the column.
pub(super) fn whole(column: &str, value: Result<Value, String>) -> Result<Value, String> {
    let value = value.map_err(|fault| format!("column \"{column}\" {fault}"))?;
    match value.as_str().and_then(odd::noted) {
        Some(what) => Err(what.to_owned()),
        None => Ok(value),
    }
}

/// Returns the error for a column of token ids.
pub(super) fn invalid_id(column: &str) -> String {
    format!("column \"{column}\" contains a number that is not a token id, an integer from 0 to 2147483647")
}
