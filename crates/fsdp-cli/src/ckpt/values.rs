//! Formats checkpoint values other than tensors, as text and as JSON.
//!
//! Neither form can be read back: values without a JSON equivalent become text. Conversions copy the values themselves.

use std::fmt::Write;

use fsdp_ckpt::checkpoint::Value;
use serde_json::{Map, Value as Json, json};

/// Maximum characters of a value in text.
const SHOWN_MAX: usize = 60;

/// A value as JSON.
pub(super) fn json(value: &Value) -> Json {
    let list = |items: &[Value]| Json::Array(items.iter().map(json).collect());
    match value {
        Value::None => Json::Null,
        Value::Bool(value) => json!(value),
        Value::Int(value) => json!(value),
        Value::Str(value) => json!(value),
        Value::Float(value) if value.is_finite() => json!(value),
        Value::List(items) | Value::Tuple(items) | Value::Set(items) => list(items),
        Value::Dict(items) => {
            let key = |key: &Value| match key {
                Value::Str(key) => key.clone(),
                other => full_text(other),
            };
            items.iter().map(|(name, item)| (key(name), json(item))).collect::<Map<_, _>>().into()
        }
        Value::Float(_)
        | Value::Long(_)
        | Value::Bytes(_)
        | Value::Global(_)
        | Value::Opaque(_)
        | Value::Object { .. } => json!(full_text(value)),
    }
}

/// A value on one line, truncated if long.
pub(super) fn text(value: &Value) -> String {
    short(&full_text(value))
}

/// A text on one line, truncated if long.
pub(super) fn short(text: &str) -> String {
    let lines = text.trim_end().lines().count();
    if lines > 1 {
        return format!("{lines} lines (--json shows them)");
    }
    let mut text = text.trim_end().to_owned();
    if let Some((end, _)) = text.char_indices().nth(SHOWN_MAX) {
        text.truncate(end);
        text += "..";
    }
    text
}

/// A value roughly as Python writes it.
fn full_text(value: &Value) -> String {
    match value {
        Value::None => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Int(value) => value.to_string(),
        Value::Long(bytes) => long_hex(bytes),
        Value::Float(value) => format!("{value:?}"),
        Value::Str(value) => format!("{value:?}"),
        Value::Bytes(bytes) => format!("<{} bytes>", bytes.len()),
        Value::List(items) => format!("[{}]", joined(items)),
        Value::Tuple(items) if items.len() == 1 => format!("({},)", joined(items)),
        Value::Tuple(items) => format!("({})", joined(items)),
        Value::Set(items) => format!("{{{}}}", joined(items)),
        Value::Dict(items) => {
            let items: Vec<String> = items
                .iter()
                .map(|(key, value)| format!("{}: {}", full_text(key), full_text(value)))
                .collect();
            format!("{{{}}}", items.join(", "))
        }
        Value::Opaque(class) => format!("<{class}, not read>"),
        Value::Global(global) => global.to_string(),
        Value::Object { class, args, .. } => format!("{class}({})", joined(args)),
    }
}

fn joined(items: &[Value]) -> String {
    items.iter().map(full_text).collect::<Vec<_>>().join(", ")
}

/// A long integer in hexadecimal.
fn long_hex(bytes: &[u8]) -> String {
    let is_negative = bytes.last().is_some_and(|last| last & 0x80 != 0);
    let mut carry = is_negative;
    let mut magnitude: Vec<u8> = bytes.to_vec();
    if is_negative {
        for byte in &mut magnitude {
            (*byte, carry) = (!*byte).overflowing_add(u8::from(carry));
        }
    }
    let mut text = String::new();
    for byte in magnitude.iter().rev() {
        let _ = write!(text, "{byte:02x}");
    }
    let digits = text.trim_start_matches('0');
    format!("{}0x{}", if is_negative { "-" } else { "" }, if digits.is_empty() { "0" } else { digits })
}

#[cfg(test)]
mod tests {
    use fsdp_ckpt::checkpoint::Global;

    use super::*;

    #[test]
    fn long_integers_are_formatted_as_hex() {
        assert_eq!(long_hex(&[0, 0, 0, 0, 0, 0, 0, 0, 1, 0]), "0x10000000000000000");
        assert_eq!(long_hex(&[0xff, 0xff]), "-0x1");
        assert_eq!(long_hex(&[0, 0x80]), "-0x8000");
        assert_eq!(long_hex(&[]), "0x0");
    }

    #[test]
    fn values_are_formatted_like_python() {
        let text_of = |text: &str| Value::Str(text.to_owned());
        let value = Value::Dict(vec![
            (text_of("betas"), Value::Tuple(vec![Value::Float(0.9), Value::Float(1.0)])),
            (Value::Int(1), Value::List(vec![Value::None, Value::Bool(true)])),
        ]);
        assert_eq!(text(&value), r#"{"betas": (0.9, 1.0), 1: [None, True]}"#);
        assert_eq!(json(&value).to_string(), r#"{"betas":[0.9,1.0],"1":[null,true]}"#);
        assert_eq!(text(&Value::Tuple(vec![text_of("a\nb")])), r#"("a\nb",)"#);
    }

    #[test]
    fn values_without_json_type_become_strings() {
        assert_eq!(json(&Value::Float(f64::NAN)), "NaN");
        assert_eq!(json(&Value::Bytes(vec![0; 256])), "<256 bytes>");
        let class = Global { module: "torch".into(), name: "device".into() };
        let device = Value::Object { class, args: vec![Value::Str("cpu".into())], state: None };
        assert_eq!(json(&device), r#"torch.device("cpu")"#);
    }

    #[test]
    fn multiline_text_is_shown_as_line_count() {
        assert_eq!(short("[model]\npath = 1\n"), "2 lines (--json shows them)");
        assert_eq!(short("one\n"), "one");
    }

    #[test]
    fn long_values_are_truncated_at_char_boundary() {
        let shown = text(&Value::Str("é".repeat(100)));
        assert_eq!(shown.chars().count(), SHOWN_MAX + 2);
        assert!(shown.ends_with("é.."));
    }
}
