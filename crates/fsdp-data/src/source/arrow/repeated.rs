//! Measures rows whose values may be larger than their place in the file, before they are read.
//!
//! Entries of dictionaries and views can be the same long text again and again, and nulls take no space at all. All other values are at
//! least as large in the file as it takes to hold them.

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef};
use arrow_schema::DataType;

use super::super::batch::ROW_VALUES_MAX;
use super::values::{entry, items};

/// Number of rows of a record batch that are measured: rows without bytes may be without number.
const ROWS_MAX: usize = 1 << 20;

/// What is left of what a row may have.
struct Left {
    values: u64,
    bytes: u64,
}

/// The number of bytes that the first rows expand to, at least. A row may expand to `bytes_max`.
///
/// # Errors
/// The index of a row that expands to more than a row may have, and what is wrong with it.
pub(super) fn bytes(
    columns: &[(String, ArrayRef)],
    rows: usize,
    bytes_max: u64,
) -> Result<u64, (usize, String)> {
    let columns: Vec<_> = columns.iter().filter(|(_, array)| repeats(array.data_type())).collect();
    let mut sum = 0;
    for row in 0..if columns.is_empty() { 0 } else { rows.min(ROWS_MAX) } {
        let mut left = Left { values: ROW_VALUES_MAX, bytes: bytes_max };
        for (name, array) in &columns {
            left.take(array, row).ok_or_else(|| {
                let max = format!("{ROW_VALUES_MAX} values and {bytes_max} bytes (data.expansion_max)");
                (row, format!("column \"{name}\" expands to more than {max}; is the file damaged?"))
            })?;
        }
        sum += bytes_max - left.bytes;
    }
    Ok(sum)
}

/// Whether values of a type can be larger in memory than in a file.
fn repeats(kind: &DataType) -> bool {
    match kind {
        DataType::Dictionary(..) | DataType::Utf8View | DataType::BinaryView | DataType::Null => true,
        DataType::FixedSizeList(_, 0) => true,
        DataType::List(items)
        | DataType::LargeList(items)
        | DataType::FixedSizeList(items, _)
        | DataType::Map(items, _) => repeats(items.data_type()),
        DataType::Struct(fields) => {
            fields.is_empty() || fields.iter().any(|field| repeats(field.data_type()))
        }
        _ => false,
    }
}

impl Left {
    /// Subtracts a value; `None` if too little is left.
    fn take(&mut self, array: &dyn Array, row: usize) -> Option<()> {
        self.values = self.values.checked_sub(1)?;
        if array.is_null(row) {
            return Some(());
        }
        if let Some((values, at)) = entry(array, row) {
            return self.take(values, at);
        }
        if let Some(items) = items(array, row) {
            return self.take_all(&items);
        }
        let len = match array.data_type() {
            DataType::Utf8 => array.as_string::<i32>().value_length(row) as u64,
            DataType::LargeUtf8 => array.as_string::<i64>().value_length(row) as u64,
            DataType::Binary => array.as_binary::<i32>().value_length(row) as u64,
            DataType::LargeBinary => array.as_binary::<i64>().value_length(row) as u64,
            DataType::FixedSizeBinary(len) => u64::try_from(*len).unwrap_or(0),
            DataType::Utf8View => array.as_string_view().value(row).len() as u64,
            DataType::BinaryView => array.as_binary_view().value(row).len() as u64,
            DataType::Struct(_) => {
                return array.as_struct().columns().iter().try_for_each(|column| self.take(column, row));
            }
            DataType::Map(..) => return self.take_all(&array.as_map().value(row)),
            _ => 0,
        };
        self.bytes = self.bytes.checked_sub(len)?;
        Some(())
    }

    fn take_all(&mut self, items: &dyn Array) -> Option<()> {
        (0..items.len()).try_for_each(|item| self.take(items, item))
    }
}

#[cfg(test)]
mod tests;
