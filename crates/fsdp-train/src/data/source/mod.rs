//! Where records come from: one file after the other, in batches that worker threads take apart.
//!
//! Reading and decompressing is one thread's work, in the order of the files. What costs time is left in the batches:
//! parsing, checking of UTF-8, and (by the [encoder](super::encoder)) tokenizing.

mod arrow;
mod compressed;
mod lines;
mod parquet;
mod whole;

use super::error::DataError;
use super::files::{DataFile, Kind};
use super::progress::Meter;
use super::record::{Fields, Place, Record};

/// The longest line or compressed document. What is longer is no text that anybody trains on, but a damaged file, or one
/// that was made to exhaust memory.
const RECORD_BYTES_MAX: u64 = 1 << 30;

/// Bytes of lines or rows from which a batch is full.
const BATCH_BYTES: usize = 1 << 17;

/// Rows after which a batch is full, however short they are.
const BATCH_ROWS: usize = 1 << 12;

/// Some records of a file, in order.
#[derive(Debug)]
pub(super) struct Batch {
    /// The index of the file.
    pub(super) file: usize,
    /// What was read.
    content: Content,
}

#[derive(Debug)]
enum Content {
    /// A document that is a file.
    Whole(Vec<u8>),
    /// Lines of JSON, the first of which has this number.
    Lines { first: u64, bytes: Vec<u8> },
    /// Rows of a row group or of a file, the first of which has this number.
    Rows { group: Option<usize>, first: u64, records: Vec<Result<Record, String>>, bytes: usize },
}

/// Why there is no record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NoRecord {
    /// The file is not UTF-8, from this byte on.
    NotText(usize),
    /// The record is not what it should be, in words.
    Malformed(String),
}

/// A record or what is wrong with it, and where it stands.
pub(super) type Found = (Place, Result<Record, NoRecord>);

impl Batch {
    /// The bytes that it holds.
    pub(super) fn len_bytes(&self) -> usize {
        match &self.content {
            Content::Whole(bytes) | Content::Lines { bytes, .. } => bytes.len(),
            Content::Rows { bytes, .. } => *bytes,
        }
    }

    /// Shortens a document that is a file to so many bytes, but not within a character; says whether it was longer.
    pub(super) fn cut(&mut self, bytes_max: usize) -> bool {
        let Content::Whole(bytes) = &mut self.content else { return false };
        if bytes.len() <= bytes_max {
            return false;
        }
        let is_start = |&at: &usize| bytes[at] & 0b1100_0000 != 0b1000_0000;
        let end = (0..=bytes_max).rev().take(4).find(is_start).unwrap_or(bytes_max);
        bytes.truncate(end);
        true
    }

    /// Its records, in order. Lines without text have none.
    pub(super) fn for_each(self, fields: &Fields, mut found: impl FnMut(Found)) {
        match self.content {
            Content::Whole(bytes) => {
                let text = String::from_utf8(bytes).map(Record::Text);
                let not_text = |fault: std::string::FromUtf8Error| fault.utf8_error().valid_up_to();
                found((Place::Whole, text.map_err(|fault| NoRecord::NotText(not_text(fault)))));
            }
            Content::Lines { first, bytes } => {
                let lines = bytes.split(|&byte| byte == b'\n').zip(first..);
                for (line, number) in lines.filter(|(line, _)| !line.trim_ascii().is_empty()) {
                    found((Place::Line(number), fields.parse(line).map_err(NoRecord::Malformed)));
                }
            }
            Content::Rows { group, first, records, .. } => {
                for (record, row) in records.into_iter().zip(first..) {
                    found((Place::Row { group, row }, record.map_err(NoRecord::Malformed)));
                }
            }
        }
    }
}

/// Batches of a file.
pub(super) type Batches = Box<dyn Iterator<Item = Result<Batch, DataError>> + Send>;

/// Opens a file, whose bytes are counted while they are read.
///
/// # Errors
/// [`DataError`]: it can not be read, is not what it should be, or has no such column.
pub(super) fn open(
    index: usize,
    file: &DataFile,
    fields: &Fields,
    meter: &Meter,
) -> Result<Batches, DataError> {
    match file.kind {
        Kind::Text => whole::open(index, file, meter),
        Kind::Jsonl => lines::open(index, file, meter),
        Kind::Parquet => parquet::open(index, file, fields, meter),
        Kind::Arrow => arrow::open(index, file, fields, meter),
        Kind::Tokens(_) => unreachable!("files of tokens are mapped"),
    }
}

/// What is wrong with a column of token ids.
fn no_id(column: &str) -> String {
    format!("column \"{column}\" holds a number that is no token id, an integer from 0 to 2147483647")
}

#[cfg(test)]
mod tests;
