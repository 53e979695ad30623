//! Checks what the metadata of a file declares, before any row is read.

use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData};
use parquet::schema::types::SchemaDescriptor;

use super::super::batch::ROW_BYTES;
use crate::error::DataError;
use crate::files::DataFile;
use crate::record::RecordPosition;
use crate::source::expansion::Bounds;

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
