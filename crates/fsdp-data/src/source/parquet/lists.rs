//! Bounds the lists of a row before the row is read, which is done as a whole.
//!
//! Equal values take no space in a file: some kilobytes can be a list of billions of numbers, or thousands of copies of one long
//! text of the dictionary, in one row among many short ones.

use parquet::basic::{Encoding, Type as PhysicalType};
use parquet::column::page::Page;
use parquet::column::reader::ColumnReader;
use parquet::errors::ParquetError;
use parquet::file::reader::RowGroupReader;
use parquet::schema::types::SchemaDescriptor;

/// Maximum number of rows decoded ahead, which is small because rows may be long.
const ROWS_AHEAD: u64 = 64;

/// What the lists of a row may have.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowMax {
    pub(super) values: u64,
    /// Bytes of texts.
    pub(super) bytes: u64,
}

/// Checks the lists in the columns of a schema, and returns how many rows may be decoded ahead.
///
/// # Errors
/// If the lists of a row are too long, or the file is damaged.
pub(super) fn check(
    group: &dyn RowGroupReader,
    schema: &SchemaDescriptor,
    max: RowMax,
) -> Result<usize, ParquetError> {
    let mut ahead = ROWS_AHEAD;
    for (index, column) in group.metadata().columns().iter().enumerate() {
        let is_read = schema.columns().iter().any(|read| read.path() == column.column_path());
        if column.column_descr().max_rep_level() == 0 || !is_read {
            continue;
        }
        let (values, text) = (values(group, index)?, longest_text(group, index)?);
        if values <= max.values && values.saturating_mul(text) <= max.bytes {
            continue;
        }
        let (row, longest) = longest_row(group, index)?;
        refuse(row, longest, "values", max.values, "")?;
        ahead = ahead.min(max.values / longest.max(1)).max(1);
        // Few columns come this far: the exact measure takes as long as reading them.
        if longest.saturating_mul(text) > max.bytes {
            let (row, bytes) = largest_row(group, index)?;
            refuse(row, bytes, "bytes", max.bytes, " for a file of this size (data.expansion_max)")?;
            ahead = 1;
        }
    }
    Ok(ahead as usize)
}

fn refuse(row: u64, got: u64, unit: &str, max: u64, why: &str) -> Result<(), ParquetError> {
    if got <= max {
        return Ok(());
    }
    Err(ParquetError::General(format!("row {row} has lists of {got} {unit}; the maximum is {max}{why}")))
}

/// The number of values of a column, by the headers of its pages, which decide what is read.
fn values(group: &dyn RowGroupReader, index: usize) -> Result<u64, ParquetError> {
    let (mut pages, mut values) = (group.get_column_page_reader(index)?, 0);
    while let Some(page) = pages.peek_next_page()? {
        values += page.num_levels.unwrap_or(0) as u64;
        pages.skip_next_page()?;
    }
    Ok(values)
}

/// The row with the longest lists in a column, and the number of its values.
fn longest_row(group: &dyn RowGroupReader, index: usize) -> Result<(u64, u64), ParquetError> {
    let max_level = group.metadata().column(index).column_descr().max_rep_level();
    let bits = (i16::BITS - max_level.leading_zeros()) as usize;
    // The number of rows so far, and the values of the last one.
    let (mut rows, mut values, mut longest) = (0_u64, 0, (0, 0));
    for page in group.get_column_page_reader(index)? {
        let Some((levels, count)) = repetition_levels(&page?)? else { continue };
        let mut add = |is_first: bool, count: u64| {
            let row = if is_first { rows } else { rows.saturating_sub(1) };
            (rows, values) = if is_first { (rows + count, 1) } else { (rows, values + count) };
            if values > longest.1 {
                longest = (row, values);
            }
        };
        let read = for_each_run(&levels, bits, count, &mut add);
        read.ok_or_else(|| ParquetError::General("its repetition levels are truncated".to_owned()))?;
    }
    Ok(longest)
}

/// The encoded repetition levels of a page of data, and their number.
fn repetition_levels(page: &Page) -> Result<Option<(Vec<u8>, u64)>, ParquetError> {
    let truncated = || ParquetError::General("a page ends in its levels".to_owned());
    let (levels, count) = match page {
        Page::DictionaryPage { .. } => return Ok(None),
        Page::DataPage { buf, num_values, rep_level_encoding: Encoding::RLE, .. } => {
            let (len, rest) = buf.split_first_chunk().ok_or_else(truncated)?;
            (rest.get(..u32::from_le_bytes(*len) as usize), num_values)
        }
        Page::DataPage { rep_level_encoding, .. } => {
            let reason =
                format!("lists this long are not supported with levels encoded as {rep_level_encoding}");
            return Err(ParquetError::NYI(reason));
        }
        Page::DataPageV2 { buf, num_values, rep_levels_byte_len, .. } => {
            (buf.get(..*rep_levels_byte_len as usize), num_values)
        }
    };
    Ok(Some((levels.ok_or_else(truncated)?.to_vec(), u64::from(*count))))
}

/// Decodes levels of some bits, in the hybrid of runs and packed groups: calls `visit` with whether levels are zero, and their
/// number if they are a run. Returns `None` if there are fewer than `count`.
fn for_each_run(mut bytes: &[u8], bits: usize, count: u64, visit: &mut impl FnMut(bool, u64)) -> Option<()> {
    let mut left = count;
    while left > 0 {
        let header = varint(&mut bytes)?;
        if header & 1 == 0 {
            let (level, rest) = bytes.split_at_checked(bits.div_ceil(8))?;
            let run = (header >> 1).min(left);
            visit(level.iter().all(|&byte| byte == 0), run);
            (bytes, left) = (rest, left - run);
            continue;
        }
        let len = usize::try_from(header >> 1).ok()?.saturating_mul(bits).min(bytes.len());
        let (packed, rest) = bytes.split_at(len);
        let is_set = |bit: usize| packed[bit / 8] >> (bit % 8) & 1 == 1;
        let levels = (len * 8 / bits).min(usize::try_from(left).unwrap_or(usize::MAX));
        for level in 0..levels {
            visit(!(level * bits..(level + 1) * bits).any(is_set), 1);
        }
        (bytes, left) = (rest, left - levels as u64);
    }
    Some(())
}

/// Reads a number of 7 bits per byte.
fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..35).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// The number of bytes of the longest value that takes no space where it is repeated; 0 if there is none.
fn longest_text(group: &dyn RowGroupReader, index: usize) -> Result<u64, ParquetError> {
    let column = group.metadata().column(index);
    match column.column_descr().physical_type() {
        PhysicalType::BYTE_ARRAY => {}
        PhysicalType::FIXED_LEN_BYTE_ARRAY => {
            return Ok(u64::try_from(column.column_descr().type_length()).unwrap_or(0));
        }
        _ => return Ok(0),
    }
    let Some(Page::DictionaryPage { buf, .. }) = group.get_column_page_reader(index)?.get_next_page()? else {
        return Ok(0);
    };
    let (mut rest, mut longest) = (&buf[..], 0);
    while let Some((len, after)) = rest.split_first_chunk() {
        let len = u32::from_le_bytes(*len);
        longest = longest.max(u64::from(len));
        rest = after.get(len as usize..).unwrap_or_default();
    }
    Ok(longest)
}

/// The row with the largest texts in the lists of a column, and the number of their bytes. Reads no copies of the texts.
fn largest_row(group: &dyn RowGroupReader, index: usize) -> Result<(u64, u64), ParquetError> {
    let (mut row, mut largest) = (0, (0, 0));
    let (mut definitions, mut repetitions) = (Vec::new(), Vec::new());
    macro_rules! measure {
        ($reader:expr) => {{
            let mut values = Vec::new();
            loop {
                definitions.clear();
                repetitions.clear();
                values.clear();
                let levels = (Some(&mut definitions), Some(&mut repetitions));
                let (rows, ..) = $reader.read_records(1, levels.0, levels.1, &mut values)?;
                if rows == 0 {
                    return Ok(largest);
                }
                let bytes = values.iter().map(|value| value.len() as u64).sum();
                largest = if bytes > largest.1 { (row, bytes) } else { largest };
                row += 1;
            }
        }};
    }
    match group.get_column_reader(index)? {
        ColumnReader::ByteArrayColumnReader(mut reader) => measure!(reader),
        ColumnReader::FixedLenByteArrayColumnReader(mut reader) => measure!(reader),
        _ => Ok(largest),
    }
}

#[cfg(test)]
mod tests;
