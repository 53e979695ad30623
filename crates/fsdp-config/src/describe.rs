//! Describes keys for the schema of run files: each method of [`Reader`](super::reader::Reader) that reads a key has a
//! function here that describes what it accepts. A kind is probed for the values it reads.

use std::marker::PhantomData;
use std::net::SocketAddr;

use fsdp_core::schedule::Reshard;
use fsdp_core::wrap::WrapPolicy;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::kind::{FAMILY, Kind, NONE, POSITIVE_LENGTH, TEXTS};
use super::named::Named;

/// A type that reads a table of the run file.
pub(super) trait TableSchema {
    /// Returns the schema of the table.
    fn schema() -> Value;
}

/// A type of value with a form in JSON.
pub(super) trait ValueSchema: Sized {
    /// Returns the schema of the values that the kind reads.
    fn of(kind: &Kind<Self>) -> Value;
}

/// Returns the schema of a table with these keys, their descriptions and schemas. The keys in `also` take any value.
pub(super) fn of_table(about: &str, keys: Vec<(&str, &str, Value)>, also: &[&str]) -> Value {
    let declared = keys.into_iter().map(|(key, about, schema)| (key.to_owned(), described(about, schema)));
    let also = also.iter().map(|key| ((*key).to_owned(), json!({})));
    let properties: Map<String, Value> = declared.chain(also).collect();
    let object = json!({"type": "object", "properties": properties, "additionalProperties": false});
    described(about, object)
}

/// Returns the schema of a table that is one of several, selected by `name`, which may be omitted for the first.
pub(super) fn by_name(tables: impl IntoIterator<Item = (&'static str, Value)>) -> Value {
    let named = |(index, (name, mut table)): (usize, (&str, Value))| {
        table["properties"]["name"] = json!({"const": name});
        if index > 0 {
            table["required"] = json!(["name"]);
        }
        table
    };
    json!({"oneOf": tables.into_iter().enumerate().map(named).collect::<Vec<_>>()})
}

/// Puts `about` in front of the schema's own description.
pub(super) fn described(about: &str, mut schema: Value) -> Value {
    let existing = schema.get("description").and_then(Value::as_str).unwrap_or_default();
    schema["description"] = format!("{} {existing}", about.trim()).trim().into();
    schema
}

fn of_kind<T: ValueSchema>(kind: &Kind<T>, none: Option<&str>) -> Value {
    let allowed =
        format!("It must be {}{}.", kind.allowed, none.map_or(String::new(), |n| format!(", or \"{n}\"")));
    let schema = T::of(kind);
    let schema = none.map_or(schema.clone(), |none| json!({"anyOf": [schema, {"const": none}]}));
    described(&allowed, schema)
}

fn with_default<T: Serialize>(mut schema: Value, default: &T) -> Value {
    schema["default"] = json!(default);
    schema
}

pub(super) fn or<T: ValueSchema + Serialize>(_: PhantomData<T>, kind: Kind<T>, default: T) -> Value {
    let schema = of_kind(&kind, None);
    // A default that cannot be written stands for a value that depends on the machine.
    let can_be_written = toml::Value::try_from(&default).is_ok_and(|value| (kind.read)(&value).is_some());
    if can_be_written { with_default(schema, &default) } else { schema }
}

pub(super) fn or_none<T: ValueSchema>(_: PhantomData<Option<T>>, kind: Kind<T>) -> Value {
    with_default(of_kind(&kind, Some(NONE)), &NONE)
}

pub(super) fn unless_none<T: ValueSchema + Serialize>(
    _: PhantomData<Option<T>>,
    kind: Kind<T>,
    default: T,
) -> Value {
    with_default(of_kind(&kind, Some(NONE)), &default)
}

pub(super) fn required<T: ValueSchema>(_: PhantomData<T>, kind: Kind<T>) -> Value {
    of_kind(&kind, None)
}

pub(super) fn required_unless<T: ValueSchema>(_: PhantomData<T>, _other: &str, kind: Kind<T>) -> Value {
    of_kind(&kind, None)
}

pub(super) fn named<T: Named>(_: PhantomData<T>, default: T) -> Value {
    with_default(json!({"enum": names_of::<T>()}), &default.name())
}

pub(super) fn named_or_none<T: Named>(_: PhantomData<Option<T>>) -> Value {
    let names: Vec<&str> = names_of::<T>().into_iter().chain([NONE]).collect();
    with_default(json!({"enum": names}), &NONE)
}

pub(super) fn names<T: Named>(_: PhantomData<Vec<T>>) -> Value {
    json!({"type": "array", "items": {"enum": names_of::<T>()}, "uniqueItems": true, "default": []})
}

pub(super) fn table<T: TableSchema, R>(_: PhantomData<T>, _read: R) -> Value {
    T::schema()
}

pub(super) fn table_or_none<T: TableSchema, R>(_: PhantomData<Option<T>>, _read: R) -> Value {
    T::schema()
}

pub(super) fn tables<T: TableSchema, R>(_: PhantomData<Vec<T>>, _allowed: &str, _read: R) -> Value {
    json!({"type": "array", "items": T::schema()})
}

pub(super) fn eval_sets<T: TableSchema>(_: PhantomData<Vec<T>>) -> Value {
    json!({"anyOf": [ValueSchema::of(&TEXTS), {"type": "array", "items": T::schema()}], "default": []})
}

pub(super) fn patterns(_: PhantomData<Vec<String>>) -> Value {
    with_default(ValueSchema::of(&TEXTS), &[""; 0])
}

pub(super) fn patterns_or_family(_: PhantomData<Option<Vec<String>>>) -> Value {
    with_default(json!({"anyOf": [ValueSchema::of(&TEXTS), {"const": FAMILY}]}), &FAMILY)
}

pub(super) fn wrap(_: PhantomData<WrapPolicy>) -> Value {
    ValueSchema::of(&TEXTS)
}

pub(super) fn reshard(_: PhantomData<Reshard>) -> Value {
    json!({"anyOf": [{"type": "boolean"}, {"const": "auto"}, ValueSchema::of(&POSITIVE_LENGTH)], "default": "auto"})
}

fn names_of<T: Named>() -> Vec<&'static str> {
    T::NAMES.iter().map(|(name, _)| *name).collect()
}

fn integer<T>(kind: &Kind<T>) -> Value {
    let minimum = i64::from((kind.read)(&toml::Value::Integer(0)).is_none());
    json!({"type": "integer", "minimum": minimum})
}

impl ValueSchema for u64 {
    fn of(kind: &Kind<u64>) -> Value {
        integer(kind)
    }
}

impl ValueSchema for usize {
    fn of(kind: &Kind<usize>) -> Value {
        integer(kind)
    }
}

impl ValueSchema for f64 {
    fn of(_: &Kind<f64>) -> Value {
        json!({"type": "number"})
    }
}

impl ValueSchema for [f64; 2] {
    fn of(_: &Kind<[f64; 2]>) -> Value {
        json!({"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2})
    }
}

impl ValueSchema for bool {
    fn of(_: &Kind<bool>) -> Value {
        json!({"type": "boolean"})
    }
}

impl ValueSchema for String {
    fn of(_: &Kind<String>) -> Value {
        json!({"type": "string"})
    }
}

impl ValueSchema for SocketAddr {
    fn of(_: &Kind<SocketAddr>) -> Value {
        json!({"type": "string"})
    }
}

impl ValueSchema for Vec<String> {
    fn of(kind: &Kind<Vec<String>>) -> Value {
        let list = json!({"type": "array", "items": {"type": "string"}});
        // Some kinds accept a single string for a list of one.
        match (kind.read)(&"one".into()) {
            Some(_) => json!({"anyOf": [{"type": "string"}, list]}),
            None => list,
        }
    }
}
