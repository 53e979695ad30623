//! The shapes of columns, by their types.

use arrow_schema::DataType;

use super::super::shape::Shape;

/// Returns the shape of values of a type at a place.
pub(super) fn of(place: &str, kind: &DataType) -> Shape {
    match kind {
        DataType::List(items) | DataType::LargeList(items) | DataType::FixedSizeList(items, _) => {
            Shape::list(of(&format!("{place}[]"), items.data_type()))
        }
        DataType::Map(entries, _) => match entries.data_type() {
            DataType::Struct(fields) if fields.len() == 2 && is_text(fields[0].data_type()) => {
                Shape::map(of(&format!("{place}{{}}"), fields[1].data_type()))
            }
            _ => Shape::odd_map(place),
        },
        DataType::Struct(fields) => {
            let part = |name: &String, kind| (name.clone(), of(&format!("{place}.{name}"), kind));
            Shape::object(fields.iter().map(|field| part(field.name(), field.data_type())).collect())
        }
        DataType::Dictionary(_, values) => of(place, values),
        DataType::Binary | DataType::LargeBinary | DataType::BinaryView | DataType::FixedSizeBinary(_) => {
            Shape::Bytes(place.to_owned())
        }
        DataType::Null | DataType::Boolean => Shape::Json,
        kind if is_text(kind) || kind.is_integer() || kind.is_floating() => Shape::Json,
        DataType::Date32 | DataType::Date64 => Shape::odd(place, "date"),
        DataType::Time32(_) | DataType::Time64(_) => Shape::odd(place, "time"),
        DataType::Timestamp(..) => Shape::odd(place, "timestamp"),
        DataType::Duration(_) => Shape::odd(place, "duration"),
        DataType::Interval(_) => Shape::odd(place, "interval"),
        kind if kind.is_decimal() => Shape::odd(place, "decimal"),
        other => Shape::odd(place, other),
    }
}

/// Whether values of a type may be the names of fields.
fn is_text(kind: &DataType) -> bool {
    match kind {
        DataType::Dictionary(_, values) => is_text(values),
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => true,
        DataType::Binary | DataType::LargeBinary | DataType::BinaryView | DataType::FixedSizeBinary(_) => {
            true
        }
        _ => false,
    }
}
