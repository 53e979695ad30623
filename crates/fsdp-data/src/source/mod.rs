//! Reads records from one file after the other, in batches that worker threads parse.
//!
//! One thread reads and decompresses the files in order. The expensive work is left to the users of the batches:
//! parsing, UTF-8 validation, and (by the [encoder](super::encoder)) tokenizing.

mod arrow;
mod batch;
mod compressed;
mod expansion;
mod lines;
mod parquet;
mod shape;
mod text_file;

pub(super) use batch::{Batch, Batches, RecordFault};
pub(super) use expansion::{Bounds, Expansion};

use super::error::DataError;
use super::files::{DataFile, Kind};
use super::progress::Meter;
use super::record::Fields;

/// Opens a file; `meter` counts its bytes as they are read. No record is read that is larger than `bounds` allow.
///
/// # Errors
/// [`DataError`] if the file cannot be read, has another format, or lacks the columns.
pub(super) fn open(
    index: usize,
    file: &DataFile,
    bounds: Bounds,
    fields: &Fields,
    meter: &Meter,
) -> Result<Batches, DataError> {
    match file.kind {
        Kind::Text => text_file::open(index, file, bounds, meter),
        Kind::Jsonl => lines::open(index, file, bounds, meter),
        Kind::Parquet => parquet::open(index, file, bounds, fields, meter),
        Kind::Arrow => arrow::open(index, file, bounds, fields, meter),
        Kind::Tokens(_) => unreachable!("files of tokens are mapped"),
    }
}

#[cfg(test)]
mod tests;
