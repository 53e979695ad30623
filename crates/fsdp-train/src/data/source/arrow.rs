//! Reads Arrow streams of record batches, as Hugging Face's `datasets` stores data on disk. One batch is in memory at a
//! time, with all of its columns.
//!
//! Compressed batches and files with a footer (Feather) are not supported: `datasets` writes neither.

mod repeated;

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::panic::AssertUnwindSafe;

use arrow_array::cast::AsArray;
use arrow_array::types::{
    ArrowPrimitiveType, Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type,
    UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_buffer::Buffer;
use arrow_ipc::reader::StreamDecoder;
use arrow_schema::{ArrowError, DataType};
use serde_json::{Map, Value};

use super::{BATCH_BYTES, BATCH_ROWS, Batch, Batches, Content, RECORD_BYTES_MAX, check_row, invalid_id};
use crate::data::error::DataError;
use crate::data::expansion::Bounds;
use crate::data::files::{self, DataFile};
use crate::data::panics;
use crate::data::progress::{Meter, Metered};
use crate::data::record::{COMPANIONS, Fields, NOT_JSON, Record, RecordPosition};
use crate::data::tokens::IGNORED_BIT;
use crate::input_file;

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
    let file = file.clone();
    let mut rows = Rows { index, file, bounds, stream, columns, batch: None, at: 0, row: 0, ahead: 0 };
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
                let record = record(&columns, self.at);
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

/// Returns the record of a row.
fn record(columns: &[(String, ArrayRef)], row: usize) -> Result<Record, String> {
    if let [(name, array)] = columns {
        if let Some(text) = text(array, row) {
            return text.map(Record::Text).map_err(|at| not_text(name, at));
        }
        if let Some(ids) = items(array, row).and_then(|items| ids(&items)) {
            return ids.map(Record::Tokens).ok_or_else(|| invalid_id(name));
        }
    }
    let field = |(name, array): &(String, ArrayRef)| {
        let value = json(array, row).map_err(|fault| format!("column \"{name}\" {fault}"))?;
        Ok((name.clone(), value))
    };
    columns.iter().map(field).collect::<Result<Map<_, _>, String>>().map(Record::Object)
}

/// Returns a text, or the offset of the first byte that is not UTF-8; `None` if the value is null or has another type.
fn text(array: &dyn Array, row: usize) -> Option<Result<String, usize>> {
    if array.is_null(row) {
        return None;
    }
    if let Some((values, at)) = entry(array, row) {
        return text(values, at);
    }
    let bytes = match array.data_type() {
        DataType::Utf8 => return Some(Ok(array.as_string::<i32>().value(row).to_owned())),
        DataType::LargeUtf8 => return Some(Ok(array.as_string::<i64>().value(row).to_owned())),
        DataType::Utf8View => return Some(Ok(array.as_string_view().value(row).to_owned())),
        DataType::Binary => array.as_binary::<i32>().value(row),
        DataType::LargeBinary => array.as_binary::<i64>().value(row),
        DataType::BinaryView => array.as_binary_view().value(row),
        _ => return None,
    };
    Some(std::str::from_utf8(bytes).map(str::to_owned).map_err(|fault| fault.valid_up_to()))
}

/// Returns the values of a dictionary-encoded array and the index of a row's value; `None` for other arrays.
fn entry(array: &dyn Array, row: usize) -> Option<(&ArrayRef, usize)> {
    let dictionary = array.as_any_dictionary_opt()?;
    let at = number(dictionary.keys(), row).ok()?.as_u64()?;
    Some((dictionary.values(), usize::try_from(at).ok()?))
}

fn not_text(column: &str, at: usize) -> String {
    format!("column \"{column}\" is not UTF-8 text (byte {at})")
}

/// Returns the items of a list; `None` if the value is null or not a list.
fn items(array: &dyn Array, row: usize) -> Option<ArrayRef> {
    if array.is_null(row) {
        return None;
    }
    match array.data_type() {
        DataType::List(_) => Some(array.as_list::<i32>().value(row)),
        DataType::LargeList(_) => Some(array.as_list::<i64>().value(row)),
        DataType::FixedSizeList(..) => Some(array.as_fixed_size_list().value(row)),
        _ => None,
    }
}

/// Returns the token ids of a list; `None` if it has items other than integers, and `Some(None)` if an integer is not a
/// token id. The highest of 32 bits marks tokens that do not count.
fn ids(items: &dyn Array) -> Option<Option<Vec<u32>>> {
    fn primitive_ids<T: ArrowPrimitiveType<Native: TryInto<u32>>>(items: &dyn Array) -> Option<Vec<u32>> {
        let ids = items.as_primitive::<T>().values().iter();
        ids.map(|&id| id.try_into().ok().filter(|&id| id < IGNORED_BIT)).collect()
    }
    if items.is_empty() {
        return Some(Some(Vec::new()));
    }
    if items.null_count() > 0 {
        return None;
    }
    match items.data_type() {
        DataType::Int8 => Some(primitive_ids::<Int8Type>(items)),
        DataType::Int16 => Some(primitive_ids::<Int16Type>(items)),
        DataType::Int32 => Some(primitive_ids::<Int32Type>(items)),
        DataType::Int64 => Some(primitive_ids::<Int64Type>(items)),
        DataType::UInt8 => Some(primitive_ids::<UInt8Type>(items)),
        DataType::UInt16 => Some(primitive_ids::<UInt16Type>(items)),
        DataType::UInt32 => Some(primitive_ids::<UInt32Type>(items)),
        DataType::UInt64 => Some(primitive_ids::<UInt64Type>(items)),
        _ => None,
    }
}

/// Whether a value is null, also as an entry of a dictionary.
fn is_null(array: &dyn Array, row: usize) -> bool {
    let is_null_entry = |(values, at): (&ArrayRef, usize)| is_null(values, at);
    array.data_type() == &DataType::Null || array.is_null(row) || entry(array, row).is_some_and(is_null_entry)
}

/// Returns a value in its JSON form, without the null fields of structs.
///
/// # Errors
/// The type of the value, if it has no JSON form.
fn json(array: &dyn Array, row: usize) -> Result<Value, String> {
    if array.is_null(row) {
        return Ok(Value::Null);
    }
    if let Some((values, at)) = entry(array, row) {
        return json(values, at);
    }
    if let Some(text) = text(array, row) {
        return text.map(Value::String).map_err(|at| format!("is not UTF-8 text (byte {at})"));
    }
    if let Some(items) = items(array, row) {
        return (0..items.len()).map(|item| json(&items, item)).collect();
    }
    match array.data_type() {
        DataType::Null => Ok(Value::Null),
        DataType::Boolean => Ok(array.as_boolean().value(row).into()),
        DataType::Struct(fields) => {
            let columns = array.as_struct().columns();
            // A table has the fields of all of its rows in each row, so a null field is one that this row lacks.
            let present = fields.iter().zip(columns).filter(|(_, column)| !is_null(column, row));
            present.map(|(field, column)| Ok((field.name().clone(), json(column, row)?))).collect()
        }
        DataType::Map(..) => {
            let entries = array.as_map().value(row);
            let (keys, values) = (entries.column(0), entries.column(1));
            let entry = |at| match text(keys, at) {
                Some(Ok(key)) => Ok((key, json(values, at)?)),
                _ => Err("has keys that are not text".to_owned()),
            };
            (0..entries.len()).map(entry).collect()
        }
        _ => number(array, row),
    }
}

fn number(array: &dyn Array, row: usize) -> Result<Value, String> {
    fn primitive<T: ArrowPrimitiveType<Native: Into<Value>>>(array: &dyn Array, row: usize) -> Value {
        array.as_primitive::<T>().value(row).into()
    }
    let number = match array.data_type() {
        DataType::Int8 => primitive::<Int8Type>(array, row),
        DataType::Int16 => primitive::<Int16Type>(array, row),
        DataType::Int32 => primitive::<Int32Type>(array, row),
        DataType::Int64 => primitive::<Int64Type>(array, row),
        DataType::UInt8 => primitive::<UInt8Type>(array, row),
        DataType::UInt16 => primitive::<UInt16Type>(array, row),
        DataType::UInt32 => primitive::<UInt32Type>(array, row),
        DataType::UInt64 => primitive::<UInt64Type>(array, row),
        DataType::Float16 => array.as_primitive::<Float16Type>().value(row).to_f32().into(),
        DataType::Float32 => primitive::<Float32Type>(array, row),
        DataType::Float64 => primitive::<Float64Type>(array, row),
        other => {
            return Err(format!("is of type {other}; only text, numbers, lists and objects are supported"));
        }
    };
    if number.is_null() { Err(NOT_JSON.to_owned()) } else { Ok(number) }
}

/// Runs code of the library, and returns a panic as an error.
fn guarded<T>(run: impl FnOnce() -> Result<T, ArrowError>) -> Result<T, String> {
    panics::catch_panic(AssertUnwindSafe(run))?.map_err(|fault| fault.to_string())
}
