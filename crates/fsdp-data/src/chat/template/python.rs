//! Formats values as Python's `str` and `json.dumps` do, because chat templates are written for Jinja in Python.

use std::fmt::{self, Write};

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::odd;

/// Maximum width of an indentation, in spaces.
const INDENT_MAX: usize = 64;

/// Options of `json.dumps`.
#[derive(Debug)]
struct Json {
    /// Indentation of one level; `None` writes everything on one line.
    indent: Option<String>,
    between_items: String,
    after_key: String,
    is_ascii: bool,
    has_sorted_keys: bool,
}

/// The filter `tojson` of transformers: `json.dumps` with `ensure_ascii=False`, and without the HTML escapes of Jinja's
/// own filter.
///
/// # Errors
/// For values without a JSON form (undefined values), and for arguments that the filter does not have.
pub(super) fn tojson(value: &Value, is_ascii: Option<bool>, options: Kwargs) -> Result<String, Error> {
    let indent: Option<Value> = options.get("indent")?;
    let indent = indent.filter(|indent| !indent.is_none()).map(|indent| match indent.as_usize() {
        Some(spaces) => " ".repeat(spaces.min(INDENT_MAX)),
        None => indent.to_string(),
    });
    let separators: Option<Vec<String>> = options.get("separators")?;
    let is_ascii = is_ascii.map_or_else(|| options.get::<Option<bool>>("ensure_ascii"), |is| Ok(Some(is)))?;
    let has_sorted_keys: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    let defaults = [if indent.is_some() { "," } else { ", " }, ": "].map(str::to_owned);
    let [between_items, after_key] = separators.and_then(|pair| pair.try_into().ok()).unwrap_or(defaults);
    let json = Json {
        indent,
        between_items,
        after_key,
        is_ascii: is_ascii.unwrap_or(false),
        has_sorted_keys: has_sorted_keys.unwrap_or(false),
    };
    let mut out = String::new();
    json.write(&mut out, value, 0)?;
    Ok(out)
}

impl Json {
    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => match float(value) {
                Some(float) if float.is_nan() => out.push_str("NaN"),
                Some(float) if float.is_infinite() => {
                    out.push_str(if float > 0.0 { "Infinity" } else { "-Infinity" });
                }
                _ => out.push_str(&text(value)),
            },
            ValueKind::String => self.write_text(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_all(out, ['[', ']'], &items, depth, |out, item| self.write(out, item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.has_sorted_keys {
                    keys.sort();
                }
                self.write_all(out, ['{', '}'], &keys, depth, |out, key| {
                    match key.as_str() {
                        Some(key) => self.write_text(out, key),
                        None => write!(out, "\"{key}\"")?,
                    }
                    out.push_str(&self.after_key);
                    self.write(out, &value.get_item(key)?, depth + 1)
                })?;
            }
            kind => {
                odd::record_use(value);
                let message = format!("a value that is {kind} has no JSON form");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        }
        Ok(())
    }

    fn write_all(
        &self,
        out: &mut String,
        [open, close]: [char; 2],
        items: &[Value],
        depth: usize,
        mut write: impl FnMut(&mut String, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open);
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                out.push_str(&self.between_items);
            }
            self.new_line(out, depth + 1);
            write(out, item)?;
        }
        if !items.is_empty() {
            self.new_line(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn new_line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
    }

    fn write_text(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.is_ascii && !(' '..='~').contains(&c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// Formats a value as Python's `str` does, which is also how `{{ value }}` writes it.
pub(super) fn text(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None => {
            let mut out = String::new();
            // Writing to a string cannot fail.
            let _ = write_repr(&mut out, value);
            out
        }
    }
}

/// Formats a value as Python's `repr` does.
fn write_repr(out: &mut String, value: &Value) -> fmt::Result {
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => match float(value) {
            Some(float) => out.push_str(&float_text(float)),
            None => write!(out, "{value}")?,
        },
        ValueKind::String => quote(out, value.as_str().unwrap_or_default())?,
        ValueKind::Seq => write_items(out, ['[', ']'], value, write_repr)?,
        ValueKind::Map => write_items(out, ['{', '}'], value, |out, key| {
            write_repr(out, key)?;
            out.push_str(": ");
            write_repr(out, &value.get_item(key).unwrap_or_default())
        })?,
        _ => write!(out, "{value}")?,
    }
    Ok(())
}

fn write_items(
    out: &mut String,
    [open, close]: [char; 2],
    value: &Value,
    mut write: impl FnMut(&mut String, &Value) -> fmt::Result,
) -> fmt::Result {
    out.push(open);
    for (index, item) in value.try_iter().into_iter().flatten().enumerate() {
        if index > 0 {
            out.push_str(", ");
        }
        write(out, &item)?;
    }
    out.push(close);
    Ok(())
}

/// Writes single quotes, unless the text has some and no double quotes.
fn quote(out: &mut String, text: &str) -> fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => write!(out, "\\{c}")?,
            c if c < ' ' || ('\u{7f}'..'\u{a1}').contains(&c) || c == '\u{ad}' => {
                write!(out, "\\x{:02x}", u32::from(c))?;
            }
            c => out.push(c),
        }
    }
    out.push(quote);
    Ok(())
}

/// Returns the value of a number that is not an integer.
fn float(value: &Value) -> Option<f64> {
    if value.is_integer() { None } else { f64::try_from(value.clone()).ok() }
}

/// Writes the shortest digits that round-trip, with a signed exponent of at least two digits, as Python does.
fn float_text(float: f64) -> String {
    let text = format!("{float:?}");
    match text.split_once('e') {
        _ if float.is_nan() => "nan".to_owned(),
        None => text,
        Some((digits, exponent)) => match exponent.strip_prefix('-') {
            Some(exponent) => format!("{digits}e-{exponent:0>2}"),
            None => format!("{digits}e+{exponent:0>2}"),
        },
    }
}

#[cfg(test)]
mod tests;
