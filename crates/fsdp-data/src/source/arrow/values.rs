//! Values of Arrow arrays as records: texts, token ids, and JSON.

use arrow_array::cast::AsArray;
use arrow_array::types::{
    ArrowPrimitiveType, Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type,
    UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef};
use arrow_schema::{DataType, FieldRef};
use serde_json::{Map, Value};

use super::super::batch::{invalid_id, whole};
use super::super::shape::{KEYS, Shape, not_text};
use crate::record::{NOT_JSON, Record, no_json, odd};
use crate::tokens::IGNORED_BIT;

/// Returns the record of a row of columns with these shapes.
pub(super) fn record(columns: &[(String, ArrayRef)], shapes: &[Shape], row: usize) -> Result<Record, String> {
    if let [(name, array)] = columns {
        if let Some(text) = text(array, row) {
            return text.map(Record::Text).map_err(|at| not_text(name, at));
        }
        if let Some(ids) = items(array, row).and_then(|items| ids(&items)) {
            return ids.map(Record::Tokens).ok_or_else(|| invalid_id(name));
        }
    }
    let field = |((name, array), shape): (&(String, ArrayRef), &Shape)| {
        let value = whole(name, json(array, shape, row))?;
        Ok((name.clone(), value))
    };
    columns.iter().zip(shapes).map(field).collect::<Result<Map<_, _>, String>>().map(Record::Object)
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
        DataType::FixedSizeBinary(_) => array.as_fixed_size_binary().value(row),
        _ => return None,
    };
    Some(std::str::from_utf8(bytes).map(str::to_owned).map_err(|fault| fault.valid_up_to()))
}

/// Returns the values of a dictionary-encoded array and the index of a row's value; `None` for other arrays.
pub(super) fn entry(array: &dyn Array, row: usize) -> Option<(&ArrayRef, usize)> {
    let dictionary = array.as_any_dictionary_opt()?;
    let at = number(dictionary.keys(), row).ok()?.as_u64()?;
    Some((dictionary.values(), usize::try_from(at).ok()?))
}

/// Returns the items of a list; `None` if the value is null or not a list.
pub(super) fn items(array: &dyn Array, row: usize) -> Option<ArrayRef> {
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

/// Returns a value of a shape in its JSON form, without the null fields of structs.
///
/// # Errors
/// What the value is, if it has no JSON form.
fn json(array: &dyn Array, shape: &Shape, row: usize) -> Result<Value, String> {
    if array.is_null(row) {
        return Ok(Value::Null);
    }
    if let Shape::Odd(what) = shape {
        return Ok(if is_null(array, row) { Value::Null } else { odd::note(what) });
    }
    if let Some((values, at)) = entry(array, row) {
        return json(values, shape, at);
    }
    if let Some(text) = text(array, row) {
        return shape.text(text);
    }
    if let Some(items) = items(array, row) {
        return (0..items.len()).map(|item| json(&items, shape.items(), item)).collect();
    }
    match array.data_type() {
        DataType::Null => Ok(Value::Null),
        DataType::Boolean => Ok(array.as_boolean().value(row).into()),
        DataType::Struct(fields) => {
            let columns = array.as_struct().columns();
            // A table has the fields of all of its rows in each row, so a null field is one that this row lacks.
            let present =
                fields.iter().zip(columns).enumerate().filter(|(_, (_, column))| !is_null(column, row));
            let field = |(index, (field, column)): (usize, (&FieldRef, &ArrayRef))| {
                Ok((field.name().clone(), json(column, shape.field(index), row)?))
            };
            present.map(field).collect()
        }
        DataType::Map(..) => {
            let entries = array.as_map().value(row);
            let (keys, values) = (entries.column(0), entries.column(1));
            let entry = |at| match text(keys, at) {
                Some(Ok(key)) => Ok((key, json(values, shape.items(), at)?)),
                _ => Err(KEYS.to_owned()),
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
        other => return Err(no_json(other)),
    };
    if number.is_null() { Err(NOT_JSON.to_owned()) } else { Ok(number) }
}
