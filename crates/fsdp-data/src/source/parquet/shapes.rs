//! The shapes of columns, by the schema of a file. The values that are read do not tell: nanoseconds come as plain integers.

use parquet::basic::{ConvertedType, LogicalType, Repetition, Type as PhysicalType};
use parquet::schema::types::{SchemaDescriptor, Type};

use super::super::shape::Shape;
use crate::record::no_json;

/// Returns the shapes of the columns of a schema.
///
/// # Errors
/// A description of the first column that cannot be read, or has no counterpart in JSON and is used.
pub(super) fn of(schema: &SchemaDescriptor) -> Result<Vec<Shape>, String> {
    // The library does not read these.
    let interval = schema.columns().iter().find(|leaf| leaf.converted_type() == ConvertedType::INTERVAL);
    if let Some(leaf) = interval {
        return Err(format!("column \"{}\" {}", leaf.path().string(), no_json("interval")));
    }
    let columns = schema.root_schema().get_fields();
    let shapes: Vec<Shape> = columns.iter().map(|column| shape(column, column.name())).collect();
    match shapes.iter().find_map(Shape::fault) {
        Some(fault) => Err(fault.to_owned()),
        None => Ok(shapes),
    }
}

/// The shape of a field, which may be a list only because it is repeated.
fn shape(field: &Type, place: &str) -> Shape {
    match field.get_basic_info().has_repetition()
        && field.get_basic_info().repetition() == Repetition::REPEATED
    {
        true => Shape::list(single(field, &format!("{place}[]"))),
        false => single(field, place),
    }
}

fn single(field: &Type, place: &str) -> Shape {
    if field.is_primitive() {
        return leaf(field, place);
    }
    let fields = field.get_fields();
    match (field.get_basic_info().converted_type(), fields) {
        (ConvertedType::LIST, [items]) => {
            let place = format!("{place}[]");
            // Since 2014 there is a group around the items. Older writers left it out, or called it differently.
            let is_group = !items.is_primitive() && items.get_fields().len() == 1;
            let is_old = items.name() == "array" || items.name().ends_with("_tuple");
            Shape::list(if is_group && !is_old {
                shape(&items.get_fields()[0], &place)
            } else {
                single(items, &place)
            })
        }
        (ConvertedType::MAP | ConvertedType::MAP_KEY_VALUE, [entries]) if !entries.is_primitive() => {
            match entries.get_fields() {
                [keys, _] if !is_text(keys) => Shape::odd_map(place),
                [_, values] => Shape::map(shape(values, &format!("{place}{{}}"))),
                [keys] => Shape::list(shape(keys, &format!("{place}[]"))),
                _ => Shape::Json,
            }
        }
        _ => {
            let part =
                |field: &Type| (field.name().to_owned(), shape(field, &format!("{place}.{}", field.name())));
            Shape::object(fields.iter().map(|field| part(field)).collect())
        }
    }
}

fn is_text(field: &Type) -> bool {
    field.is_primitive() && matches!(leaf(field, ""), Shape::Json | Shape::Bytes(_)) && is_bytes(field)
}

fn is_bytes(field: &Type) -> bool {
    matches!(field.get_physical_type(), PhysicalType::BYTE_ARRAY | PhysicalType::FIXED_LEN_BYTE_ARRAY)
}

fn leaf(field: &Type, place: &str) -> Shape {
    let info = field.get_basic_info();
    match (info.logical_type_ref(), info.converted_type(), field.get_physical_type()) {
        (Some(LogicalType::Date), ..) | (_, ConvertedType::DATE, _) => Shape::odd(place, "date"),
        (Some(LogicalType::Time(_)), ..)
        | (_, ConvertedType::TIME_MILLIS | ConvertedType::TIME_MICROS, _) => Shape::odd(place, "time"),
        (Some(LogicalType::Timestamp(_)), ..)
        | (_, ConvertedType::TIMESTAMP_MILLIS | ConvertedType::TIMESTAMP_MICROS, _)
        | (.., PhysicalType::INT96) => Shape::odd(place, "timestamp"),
        (Some(LogicalType::Decimal(_)), ..) | (_, ConvertedType::DECIMAL, _) => Shape::odd(place, "decimal"),
        (Some(LogicalType::Float16), ..)
        | (_, ConvertedType::UTF8 | ConvertedType::ENUM | ConvertedType::JSON, _) => Shape::Json,
        _ if is_bytes(field) => Shape::Bytes(place.to_owned()),
        _ => Shape::Json,
    }
}
