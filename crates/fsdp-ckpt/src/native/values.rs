//! Values that are not tensors, as JSON: plain if JSON can represent them exactly, otherwise tagged.
//!
//! `None`, booleans, 64-bit integers, text and lists are plain. Everything else is an object with one field that names
//! the kind: `{"float":"3ff0000000000000"}` (bits, so that every value survives), `{"long":"hex"}`, `{"bytes":"hex"}`,
//! `{"tuple":[..]}`, `{"set":[..]}`, `{"dict":[[key,value],..]}`, `{"global":[module,name]}`,
//! `{"object":[[module,name],[args],state]}` (without `state` if it has none). Classes that are no part of a checkpoint
//! format become opaque, as in pickles: conversions write none that could be run.

use serde_json::{Map, Value as Json, json};

use crate::{
    checkpoint::{Global, Value},
    pickle::is_known,
};

/// Maximum nesting of values: each level takes up to three of the 128 levels that JSON readers accept.
const DEPTH_MAX: usize = 36;

/// Converts a value to JSON. `None` if it is nested too deeply.
pub(super) fn to_json(value: &Value) -> Option<Json> {
    write(value, DEPTH_MAX)
}

fn write(value: &Value, depth: usize) -> Option<Json> {
    let depth = depth.checked_sub(1)?;
    let list = |items: &[Value]| items.iter().map(|item| write(item, depth)).collect::<Option<Vec<_>>>();
    Some(match value {
        Value::None => Json::Null,
        Value::Bool(value) => json!(value),
        Value::Int(value) => json!(value),
        Value::Long(bytes) => json!({ "long": to_hex(bytes) }),
        Value::Float(value) => json!({ "float": format!("{:016x}", value.to_bits()) }),
        Value::Str(text) => json!(text),
        Value::Bytes(bytes) => json!({ "bytes": to_hex(bytes) }),
        Value::List(items) => Json::Array(list(items)?),
        Value::Tuple(items) => json!({ "tuple": list(items)? }),
        Value::Set(items) => json!({ "set": list(items)? }),
        Value::Dict(pairs) => {
            let pair =
                |(key, value): &(Value, Value)| Some(json!([write(key, depth)?, write(value, depth)?]));
            json!({ "dict": pairs.iter().map(pair).collect::<Option<Vec<_>>>()? })
        }
        Value::Opaque(class) => json!({ "opaque": [class.module, class.name] }),
        Value::Global(global) => json!({ "global": [global.module, global.name] }),
        Value::Object { class, args, state } => {
            let mut fields = vec![json!([class.module, class.name]), Json::Array(list(args)?)];
            if let Some(state) = state {
                fields.push(write(state, depth)?);
            }
            json!({ "object": fields })
        }
    })
}

/// Converts JSON to a value. `None` if it is not in the form that [`to_json`] produces.
pub(super) fn from_json(json: Json) -> Option<Value> {
    Some(match json {
        Json::Null => Value::None,
        Json::Bool(value) => Value::Bool(value),
        Json::Number(number) => Value::Int(number.as_i64()?),
        Json::String(text) => Value::Str(text),
        Json::Array(items) => Value::List(read_list(items)?),
        Json::Object(fields) => {
            let mut fields = fields.into_iter();
            let (Some((tag, content)), None) = (fields.next(), fields.next()) else { return None };
            read_tagged(&tag, content)?
        }
    })
}

fn read_tagged(tag: &str, content: Json) -> Option<Value> {
    Some(match (tag, content) {
        ("long", Json::String(text)) => Value::Long(from_hex(&text)?),
        ("float", Json::String(text)) => {
            let bytes: [u8; 8] = from_hex(&text)?.try_into().ok()?;
            Value::Float(f64::from_bits(u64::from_be_bytes(bytes)))
        }
        ("bytes", Json::String(text)) => Value::Bytes(from_hex(&text)?),
        ("tuple", Json::Array(items)) => Value::Tuple(read_list(items)?),
        ("set", Json::Array(items)) => Value::Set(read_list(items)?),
        ("dict", Json::Array(pairs)) => {
            let pair = |pair: Json| {
                let [key, value]: [Json; 2] = array(pair)?.try_into().ok()?;
                Some((from_json(key)?, from_json(value)?))
            };
            Value::Dict(pairs.into_iter().map(pair).collect::<Option<_>>()?)
        }
        ("opaque", names) => Value::Opaque(read_global(names)?),
        ("global", names) => match read_global(names)? {
            global if is_known(&global) => Value::Global(global),
            unknown => Value::Opaque(unknown),
        },
        ("object", Json::Array(fields)) => {
            let mut fields = fields.into_iter();
            let (class, args) = (read_global(fields.next()?)?, read_list(array(fields.next()?)?)?);
            let state = match fields.next() {
                Some(state) => Some(Box::new(from_json(state)?)),
                None => None,
            };
            if fields.next().is_some() {
                return None;
            }
            match is_known(&class) {
                true => Value::Object { class, args, state },
                false => Value::Opaque(class),
            }
        }
        _ => return None,
    })
}

fn read_list(items: Vec<Json>) -> Option<Vec<Value>> {
    items.into_iter().map(from_json).collect()
}

fn read_global(names: Json) -> Option<Global> {
    match <[Json; 2]>::try_from(array(names)?).ok()? {
        [Json::String(module), Json::String(name)] => Some(Global { module, name }),
        _ => None,
    }
}

fn array(json: Json) -> Option<Vec<Json>> {
    match json {
        Json::Array(items) => Some(items),
        _ => None,
    }
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| (byte as char).to_digit(16).filter(|_| !byte.is_ascii_uppercase());
    if !text.len().is_multiple_of(2) {
        return None;
    }
    text.as_bytes().chunks(2).map(|pair| Some((digit(pair[0])? << 4 | digit(pair[1])?) as u8)).collect()
}

/// Name of the value in which other formats store the state of a run.
pub(crate) const RUN_STATE: &str = "run_state";

/// Converts the state of a run to a value, so that it survives in formats without a place for it.
pub(crate) fn run_state_to_value(fields: &Map<String, Json>) -> Value {
    let pair = |(key, value): (&String, &Json)| (Value::Str(key.clone()), plain_to_value(value));
    Value::Dict(fields.iter().map(pair).collect())
}

/// Converts a value back to the state of a run. `None` if it cannot have been converted from one.
pub(crate) fn value_to_run_state(value: &Value) -> Option<Map<String, Json>> {
    match value_to_plain(value)? {
        Json::Object(fields) => Some(fields),
        _ => None,
    }
}

fn plain_to_value(json: &Json) -> Value {
    match json {
        Json::Null => Value::None,
        Json::Bool(value) => Value::Bool(*value),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(value), _) => Value::Int(value),
            (None, Some(value)) => Value::Long([&value.to_le_bytes()[..], &[0]].concat()),
            (None, None) => Value::Float(number.as_f64().expect("a JSON number is an integer or a float")),
        },
        Json::String(text) => Value::Str(text.clone()),
        Json::Array(items) => Value::List(items.iter().map(plain_to_value).collect()),
        Json::Object(fields) => run_state_to_value(fields),
    }
}

fn value_to_plain(value: &Value) -> Option<Json> {
    Some(match value {
        Value::None => Json::Null,
        Value::Bool(value) => json!(value),
        Value::Int(value) => json!(value),
        Value::Long(bytes) => match <[u8; 9]>::try_from(bytes.as_slice()).ok()? {
            [low @ .., 0] => json!(u64::from_le_bytes(low)),
            _ => return None,
        },
        Value::Float(value) => Json::Number(serde_json::Number::from_f64(*value)?),
        Value::Str(text) => json!(text),
        Value::List(items) => Json::Array(items.iter().map(value_to_plain).collect::<Option<_>>()?),
        Value::Dict(pairs) => {
            let mut fields = Map::new();
            for (key, value) in pairs {
                let Value::Str(key) = key else { return None };
                if fields.insert(key.clone(), value_to_plain(value)?).is_some() {
                    return None;
                }
            }
            Json::Object(fields)
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests;
