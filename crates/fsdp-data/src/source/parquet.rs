//! Reads Parquet by row group, and only the selected columns.

mod declared;
mod headers;
mod lists;
mod shapes;

use std::fs::File;
use std::mem;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use fsdp_config::input_file;
use parquet::data_type::ByteArray;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::{ReaderIter, TreeBuilder};
use parquet::record::{Field, Row};
use parquet::schema::types::{SchemaDescPtr, SchemaDescriptor, Type};
use serde_json::{Map, Value};

use lists::RowMax;

use super::batch::{
    BATCH_BYTES, BATCH_ROWS, Batch, Batches, Content, RECORD_BYTES_MAX, ROW_VALUES_MAX, check_row,
    invalid_id, whole,
};
use super::shape::{KEYS, Shape, not_text};
use crate::error::DataError;
use crate::files::{self, DataFile};
use crate::panics;
use crate::progress::Meter;
use crate::record::{COMPANIONS, Fields, NOT_JSON, Record, RecordPosition, odd};
use crate::source::expansion::Bounds;
use crate::tokens::IGNORED_BIT;

/// Maximum nesting of columns. The library reads them by recursion.
const DEPTH_MAX: usize = 128;

/// Returns batches of the rows of a file.
///
/// # Errors
/// [`DataError`] if the file cannot be read, is not a Parquet file, or lacks the columns.
pub(super) fn open(
    index: usize,
    file: &DataFile,
    bounds: Bounds,
    fields: &Fields,
    meter: &Meter,
) -> Result<Batches, DataError> {
    let malformed = |reason: String| DataError::Malformed { file: file.path.clone(), reason };
    let failed = |source| files::unreadable(&file.path, source);
    let raw = input_file::open(&file.path).map_err(failed)?;
    if let Some(depth) = headers::schema_depth(&raw).map_err(failed)?.filter(|&depth| depth > DEPTH_MAX) {
        return Err(malformed(format!("its columns are nested {depth} deep; the maximum is {DEPTH_MAX}")));
    }
    let opened = raw.try_clone().map_err(failed)?;
    let reader = guarded(|| SerializedFileReader::new(opened))
        .map_err(|fault| malformed(format!("it is not a Parquet file, or a truncated one: {fault}")))?;
    let root = reader.metadata().file_metadata().schema();
    let names: Vec<&str> = root.get_fields().iter().map(|field| field.name()).collect();
    let chosen = fields.choose(&names).map_err(|fault| malformed(format!("in its columns, {fault}")))?;
    let companions = COMPANIONS.into_iter().filter(|name| names.contains(name));
    let columns: Vec<String> = chosen.names().into_iter().chain(companions).map(str::to_owned).collect();
    let schema = projection(root, &columns).map_err(|fault| malformed(fault.to_string()))?;
    let shapes = shapes::of(&schema).map_err(malformed)?;
    declared::check_bytes(reader.metadata(), &schema, bounds, file)?;
    let (file, meter) = (file.clone(), meter.clone());
    Ok(Box::new(Rows {
        index,
        file,
        bounds,
        meter,
        raw,
        reader,
        schema,
        shapes,
        columns,
        group: 0,
        row: 0,
        rows: None,
    }))
}

/// Returns the schema reduced to some columns.
fn projection(root: &Type, columns: &[String]) -> Result<SchemaDescPtr, ParquetError> {
    let is_selected = |name: &str| columns.iter().any(|column| column == name);
    let selected = root.get_fields().iter().filter(|field| is_selected(field.name())).cloned().collect();
    let schema = Type::group_type_builder(root.name()).with_fields(selected).build()?;
    Ok(Arc::new(SchemaDescriptor::new(Arc::new(schema))))
}

struct Rows {
    index: usize,
    file: DataFile,
    bounds: Bounds,
    meter: Meter,
    /// Another handle of the file, for what the library does not tell.
    raw: File,
    reader: SerializedFileReader<File>,
    schema: SchemaDescPtr,
    /// The shape of each column of the schema.
    shapes: Vec<Shape>,
    columns: Vec<String>,
    /// Index of the current row group.
    group: usize,
    /// The next row in the row group.
    row: u64,
    rows: Option<ReaderIter>,
}

impl Rows {
    /// Returns rows of one row group, up to a full batch; `None` at the end.
    fn read(&mut self) -> Result<Option<Batch>, DataError> {
        while self.group < self.reader.num_row_groups() {
            let (first, mut records, mut bytes) = (self.row, Vec::new(), 0);
            while bytes < BATCH_BYTES && records.len() < BATCH_ROWS {
                let Some(row) = self.next_row()? else { break };
                let record = record(row, &self.shapes);
                let position = RecordPosition::Row { group: Some(self.group), row: self.row };
                check_row(&record, position, &self.file)?;
                bytes += record.as_ref().map_or(0, Record::len_bytes);
                records.push(record);
                self.row += 1;
            }
            if !records.is_empty() {
                let content = Content::Rows { group: Some(self.group), first, records, bytes };
                return Ok(Some(Batch { file: self.index, content, ahead: 0 }));
            }
            // The progress counts all columns of the row group, although only some are read.
            let bytes = self.reader.metadata().row_group(self.group).compressed_size();
            self.meter.add(u64::try_from(bytes).unwrap_or(0));
            (self.group, self.row, self.rows) = (self.group + 1, 0, None);
        }
        Ok(None)
    }

    fn next_row(&mut self) -> Result<Option<Row>, DataError> {
        if self.rows.is_none() {
            self.check_pages()?;
        }
        let (reader, group, schema) = (&self.reader, self.group, &self.schema);
        let max = RowMax { values: ROW_VALUES_MAX, bytes: RECORD_BYTES_MAX.min(self.bounds.limit_bytes()) };
        let rows = &mut self.rows;
        let row = guarded(|| {
            if rows.is_none() {
                let group = reader.get_row_group(group)?;
                let ahead = lists::check(&*group, schema, max)?;
                let builder = TreeBuilder::new().with_batch_size(ahead);
                *rows = Some(builder.as_iter(Arc::clone(schema), &*group)?);
            }
            rows.as_mut().and_then(Iterator::next).transpose()
        });
        row.map_err(|fault| self.unreadable(&fault))
    }

    /// Checks the size of the pages of the row group, before memory for them is reserved.
    fn check_pages(&self) -> Result<(), DataError> {
        let columns = self.reader.metadata().row_group(self.group).columns().iter();
        for column in columns.filter(|column| declared::is_in(&self.schema, column)) {
            let range = guarded(|| Ok(column.byte_range())).map_err(|fault| self.unreadable(&fault))?;
            let largest = headers::largest_page(&self.raw, range);
            let largest = largest.map_err(|source| files::unreadable(&self.file.path, source))?;
            let page = largest.ok_or_else(|| self.unreadable("the header of a page makes no sense"))?;
            if page > self.bounds.limit_bytes() {
                let position = RecordPosition::Row { group: Some(self.group), row: self.row };
                return Err(self.bounds.exceeded(&self.file, position, page));
            }
        }
        Ok(())
    }

    fn unreadable(&self, fault: &str) -> DataError {
        let (group, row, columns) = (self.group, self.row, self.columns.join("\", \""));
        let reason = format!(
            "row group {group}, row {row}, column \"{columns}\" cannot be read: {fault}; is it damaged?"
        );
        DataError::Malformed { file: self.file.path.clone(), reason }
    }
}

impl Iterator for Rows {
    type Item = Result<Batch, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        let read = self.read().transpose();
        if matches!(read, Some(Err(_))) {
            self.group = usize::MAX;
        }
        read
    }
}

/// Returns the record of a row, whose columns have these shapes.
fn record(row: Row, shapes: &[Shape]) -> Result<Record, String> {
    let mut fields = row.into_columns();
    if let [(name, field)] = &mut *fields {
        match field {
            Field::Str(text) => return Ok(Record::Text(mem::take(text))),
            Field::Bytes(bytes) => return text(bytes).map(Record::Text).map_err(|at| not_text(name, at)),
            Field::ListInternal(list) if list.elements().iter().all(is_id) => {
                let ids = list.elements().iter().map(|item| id(item).ok_or_else(|| invalid_id(name)));
                return ids.collect::<Result<_, _>>().map(Record::Tokens);
            }
            _ => {}
        }
    }
    let fields = fields.into_iter().zip(shapes).map(|((name, field), shape)| {
        let value = whole(&name, json(field, shape))?;
        Ok((name, value))
    });
    fields.collect::<Result<Map<_, _>, String>>().map(Record::Object)
}

/// Returns a text, or the index of the first byte that is not UTF-8.
fn text(bytes: &ByteArray) -> Result<String, usize> {
    String::from_utf8(bytes.data().to_vec()).map_err(|fault| fault.utf8_error().valid_up_to())
}

/// Returns a value of a shape in its JSON form, without the null fields of structs: a table has the fields of all of its
/// rows in each row, so a null field is one that this row lacks.
///
/// # Errors
/// What the value is, if it has no JSON form.
fn json(field: Field, shape: &Shape) -> Result<Value, String> {
    Ok(match (field, shape) {
        (Field::Null, _) => Value::Null,
        (_, Shape::Odd(what)) => odd::note(what),
        (Field::Group(row), _) => {
            let columns = row.into_columns().into_iter().enumerate();
            let present = columns.filter(|(_, (_, field))| !matches!(field, Field::Null));
            let fields = present.map(|(index, (name, field))| {
                let value = json(field, shape.field(index))?;
                Ok((name, value))
            });
            Value::Object(fields.collect::<Result<_, String>>()?)
        }
        (Field::ListInternal(list), _) => {
            let items = list.elements().iter().cloned().map(|item| json(item, shape.items()));
            items.collect::<Result<_, _>>()?
        }
        (Field::MapInternal(map), _) => {
            let entry = |(name, value): &(Field, Field)| {
                let name = match name {
                    Field::Str(name) => name.clone(),
                    Field::Bytes(name) => text(name).map_err(|_| KEYS)?,
                    _ => return Err(KEYS.to_owned()),
                };
                Ok((name, json(value.clone(), shape.items())?))
            };
            Value::Object(map.entries().iter().map(entry).collect::<Result<_, String>>()?)
        }
        (Field::Bytes(bytes), _) => shape.text(text(&bytes))?,
        (other, _) => {
            let value = Some(other.to_json_value()).filter(|value| !value.is_null());
            value.ok_or_else(|| NOT_JSON.to_owned())?
        }
    })
}

fn is_id(field: &Field) -> bool {
    use Field::{Byte, Int, Long, Short, UByte, UInt, ULong, UShort};
    matches!(field, Byte(_) | Short(_) | Int(_) | Long(_) | UByte(_) | UShort(_) | UInt(_) | ULong(_))
}

/// Returns a token id. The highest of 32 bits marks tokens that do not count.
fn id(field: &Field) -> Option<u32> {
    let id = match *field {
        Field::Byte(id) => i64::from(id),
        Field::Short(id) => i64::from(id),
        Field::Int(id) => i64::from(id),
        Field::Long(id) => id,
        Field::UByte(id) => i64::from(id),
        Field::UShort(id) => i64::from(id),
        Field::UInt(id) => i64::from(id),
        Field::ULong(id) => i64::try_from(id).ok()?,
        _ => return None,
    };
    u32::try_from(id).ok().filter(|&id| id < IGNORED_BIT)
}

/// Runs code of the library, and returns a panic as an error.
fn guarded<T>(run: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, String> {
    panics::catch_panic(AssertUnwindSafe(run))?.map_err(|fault| fault.to_string())
}
