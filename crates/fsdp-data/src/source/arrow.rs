//! Reads Arrow streams of record batches, as Hugging Face's `datasets` stores data on disk. One batch is in memory at a
//! time, with all of its columns.
//!
//! Compressed batches and files with a footer (Feather) are not supported: `datasets` writes neither.

mod repeated;
mod shapes;
mod values;

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::panic::AssertUnwindSafe;

use arrow_array::{ArrayRef, RecordBatch};
use arrow_buffer::Buffer;
use arrow_ipc::reader::StreamDecoder;
use arrow_schema::ArrowError;
use fsdp_config::input_file;

use values::record;

use super::batch::{BATCH_BYTES, BATCH_ROWS, Batch, Batches, Content, RECORD_BYTES_MAX, check_row};
use super::shape::Shape;
use crate::error::DataError;
use crate::files::{self, DataFile};
use crate::panics;
use crate::progress::{Meter, Metered};
use crate::record::{COMPANIONS, Fields, Record, RecordPosition};
use crate::source::expansion::Bounds;

/// Bytes per read.
const CHUNK_BYTES: u64 = 1 << 20;

/// The last bytes of a stream.
const END_OF_STREAM: [u8; 8] = [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0];

/// The first bytes of a file with a footer.
const FEATHER: &[u8; 6] = b"ARROW1";

/// Returns batches of the rows of a file.
///
/// # Errors
/// [`DataError`] if the file cannot be read, is not an Arrow stream, or lacks the columns.
pub(super) fn open(
    index: usize,
    file: &DataFile,
    bounds: Bounds,
    fields: &Fields,
    meter: &Meter,
) -> Result<Batches, DataError> {
    let malformed = |reason: String| DataError::Malformed { file: file.path.clone(), reason };
    let failed = |source| files::unreadable(&file.path, source);
    let mut opened = input_file::open(&file.path).map_err(failed)?;
    let (head, tail) = edges(&mut opened).map_err(failed)?;
    if head.starts_with(FEATHER) {
        let reason = "it is an Arrow file with a footer (Feather), but only streams, as `datasets` writes \
                      them, are supported; write it as Parquet: \
                      `pyarrow.parquet.write_table(pyarrow.feather.read_table(FILE), \"a.parquet\")`";
        return Err(malformed(reason.to_owned()));
    }
    if tail != END_OF_STREAM {
        let reason = "it does not end like an Arrow stream; is it truncated, or not an Arrow file?";
        return Err(malformed(reason.to_owned()));
    }
    let reader = Metered { inner: opened, meter: meter.clone() };
    let mut stream = Stream { reader, decoder: StreamDecoder::new(), unread: Buffer::default() };
    let batch = stream.next().map_err(|fault| {
        malformed(format!("it is not an Arrow stream, or a damaged or truncated one: {fault}"))
    })?;
    let Some(schema) = stream.decoder.schema() else {
        return Err(malformed("it is an Arrow stream without columns".to_owned()));
    };
    let names: Vec<&str> = schema.fields().iter().map(|field| &**field.name()).collect();
    let chosen = fields.choose(&names).map_err(|fault| malformed(format!("in its columns, {fault}")))?;
    let companions = COMPANIONS.into_iter().filter(|name| names.contains(name));
    let columns: Vec<String> = chosen.names().into_iter().chain(companions).map(str::to_owned).collect();
    let shape = |name: &String| {
        schema.field_with_name(name).map_or(Shape::Json, |field| shapes::of(name, field.data_type()))
    };
    let shapes: Vec<Shape> = columns.iter().map(shape).collect();
    if let Some(fault) = shapes.iter().find_map(Shape::fault) {
        return Err(malformed(fault.to_owned()));
    }
    let file = file.clone();
    let mut rows =
        Rows { index, file, bounds, stream, columns, shapes, batch: None, at: 0, row: 0, ahead: 0 };
    rows.start(batch)?;
    Ok(Box::new(rows))
}

/// Returns the first and the last bytes of a file, and rewinds it.
fn edges(file: &mut File) -> io::Result<(Vec<u8>, Vec<u8>)> {
    let mut edge = |at| -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        file.seek(at)?;
        file.take(END_OF_STREAM.len() as u64).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let head = edge(SeekFrom::Start(0))?;
    let tail = if head.len() < END_OF_STREAM.len() {
        Vec::new()
    } else {
        edge(SeekFrom::End(-(END_OF_STREAM.len() as i64)))?
    };
    file.rewind()?;
    Ok((head, tail))
}

/// Reads record batches one by one.
struct Stream {
    reader: Metered<File>,
    decoder: StreamDecoder,
    /// Bytes that were not yet passed to the decoder.
    unread: Buffer,
}

impl Stream {
    /// Returns the next record batch; `None` at the end.
    fn next(&mut self) -> Result<Option<RecordBatch>, String> {
        loop {
            if self.unread.is_empty() {
                let mut chunk = Vec::new();
                (&mut self.reader)
                    .take(CHUNK_BYTES)
                    .read_to_end(&mut chunk)
                    .map_err(|fault| fault.to_string())?;
                if chunk.is_empty() {
                    return guarded(|| self.decoder.finish()).map(|()| None);
                }
                self.unread = Buffer::from(chunk);
            }
            if let Some(batch) = guarded(|| self.decoder.decode(&mut self.unread))? {
                return Ok(Some(batch));
            }
        }
    }
}

struct Rows {
    index: usize,
    file: DataFile,
    bounds: Bounds,
    stream: Stream,
    columns: Vec<String>,
    /// The shape of each column.
    shapes: Vec<Shape>,
    /// The current record batch; `None` after the last one.
    batch: Option<RecordBatch>,
    /// The next row in the record batch.
    at: usize,
    /// The next row in the file.
    row: u64,
    /// Bytes that the next rows are known to expand to, at least.
    ahead: u64,
}

impl Rows {
    /// The columns of a record batch that are read.
    fn chosen(&self, batch: &RecordBatch) -> Vec<(String, ArrayRef)> {
        let column = |name: &String| batch.column_by_name(name).cloned().map(|array| (name.clone(), array));
        self.columns.iter().filter_map(column).collect()
    }

    /// Starts with the rows of a record batch.
    fn start(&mut self, batch: Option<RecordBatch>) -> Result<(), DataError> {
        let columns = batch.as_ref().map_or_else(Vec::new, |batch| self.chosen(batch));
        let rows = batch.as_ref().map_or(0, RecordBatch::num_rows);
        let bytes_max = RECORD_BYTES_MAX.min(self.bounds.limit_bytes());
        self.ahead = repeated::bytes(&columns, rows, bytes_max).map_err(|(at, fault)| {
            let position = RecordPosition::Row { group: None, row: self.row + at as u64 };
            DataError::Malformed { file: self.file.path.clone(), reason: format!("{position}: {fault}") }
        })?;
        (self.batch, self.at) = (batch, 0);
        Ok(())
    }

    /// Returns rows of one record batch, up to a full batch; `None` at the end.
    fn read(&mut self) -> Result<Option<Batch>, DataError> {
        while let Some(batch) = &self.batch {
            let columns = self.chosen(batch);
            let (first, mut records, mut bytes) = (self.row, Vec::new(), 0);
            while bytes < BATCH_BYTES && records.len() < BATCH_ROWS && self.at < batch.num_rows() {
                let record = record(&columns, &self.shapes, self.at);
                check_row(&record, RecordPosition::Row { group: None, row: self.row }, &self.file)?;
                bytes += record.as_ref().map_or(0, Record::len_bytes);
                records.push(record);
                (self.at, self.row) = (self.at + 1, self.row + 1);
            }
            if !records.is_empty() {
                self.ahead = self.ahead.saturating_sub(bytes as u64);
                let content = Content::Rows { group: None, first, records, bytes };
                return Ok(Some(Batch { file: self.index, content, ahead: self.ahead }));
            }
            // Freed before the next one is read.
            self.batch = None;
            let next = self.stream.next().map_err(|fault| {
                let (row, columns) = (self.row, self.columns.join("\", \""));
                let reason = format!(
                    "column \"{columns}\" cannot be read from row {row} on: {fault}; is it damaged or \
                     truncated?"
                );
                DataError::Malformed { file: self.file.path.clone(), reason }
            })?;
            self.start(next)?;
        }
        Ok(None)
    }
}

impl Iterator for Rows {
    type Item = Result<Batch, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read().transpose()
    }
}

/// Runs code of the library, and returns a panic as an error.
fn guarded<T>(run: impl FnOnce() -> Result<T, ArrowError>) -> Result<T, String> {
    panics::catch_panic(AssertUnwindSafe(run))?.map_err(|fault| fault.to_string())
}
