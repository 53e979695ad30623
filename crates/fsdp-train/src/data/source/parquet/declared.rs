//! Checks what the metadata of a file declares, before any row is read.

use parquet::basic::{ConvertedType, LogicalType, Type as PhysicalType};
use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData};
use parquet::schema::types::{ColumnDescriptor, SchemaDescriptor};

use super::super::ROW_BYTES;
use crate::data::error::DataError;
use crate::data::expansion::Bounds;
use crate::data::files::DataFile;
use crate::data::record::{RecordPosition, no_json};

/// Checks the types of columns.
///
/// # Errors
/// A description of the first that has no counterpart in JSON.
pub(super) fn check_kinds(schema: &SchemaDescriptor) -> Result<(), String> {
    let odd = schema.columns().iter().find_map(|column| Some((column.path(), odd_kind(column)?)));
    odd.map_or(Ok(()), |(path, kind)| Err(format!("column \"{}\" {}", path.string(), no_json(kind))))
}

/// Returns the type of a column whose values have no counterpart in JSON.
fn odd_kind(column: &ColumnDescriptor) -> Option<&'static str> {
    // The library returns what it cannot name as a number.
    match column.logical_type_ref() {
        Some(LogicalType::Date) => return Some("date"),
        Some(LogicalType::Time(_)) => return Some("time"),
        Some(LogicalType::Timestamp(_)) => return Some("timestamp"),
        Some(LogicalType::Decimal(_)) => return Some("decimal"),
        _ => {}
    }
    match column.converted_type() {
        ConvertedType::DATE => Some("date"),
        ConvertedType::TIME_MILLIS | ConvertedType::TIME_MICROS => Some("time"),
        ConvertedType::TIMESTAMP_MILLIS | ConvertedType::TIMESTAMP_MICROS => Some("timestamp"),
        ConvertedType::DECIMAL => Some("decimal"),
        ConvertedType::INTERVAL => Some("interval"),
        _ => (column.physical_type() == PhysicalType::INT96).then_some("timestamp"),
    }
}

/// Checks what the metadata of all row groups says that the file expands to, before the first of them is read.
///
/// # Errors
/// [`DataError::Expansion`] if that is more than it may.
pub(super) fn check_bytes(
    metadata: &ParquetMetaData,
    schema: &SchemaDescriptor,
    bounds: Bounds,
    file: &DataFile,
) -> Result<(), DataError> {
    let mut made_bytes = 0_u64;
    for (group, metadata) in metadata.row_groups().iter().enumerate() {
        let rows = u64::try_from(metadata.num_rows()).unwrap_or(0);
        made_bytes = made_bytes.saturating_add(rows.saturating_mul(ROW_BYTES as u64));
        for column in metadata.columns().iter().filter(|column| is_in(schema, column)) {
            // Texts are larger than the pages if they are entries of a dictionary. Not all writers say how large.
            let texts = column.unencoded_byte_array_data_bytes().unwrap_or(0);
            let bytes = texts.max(column.uncompressed_size());
            made_bytes = made_bytes.saturating_add(u64::try_from(bytes).unwrap_or(0));
        }
        if made_bytes > bounds.limit_bytes() {
            let position = RecordPosition::Row { group: Some(group), row: 0 };
            return Err(bounds.exceeded(file, position, made_bytes));
        }
    }
    Ok(())
}

/// Whether a column is in a schema.
pub(super) fn is_in(schema: &SchemaDescriptor, column: &ColumnChunkMetaData) -> bool {
    schema.columns().iter().any(|read| read.path() == column.column_path())
}
