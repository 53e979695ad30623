//! Values of tables that have no counterpart in JSON, such as timestamps.
//!
//! A record holds a note in their place. The model's chat template may pass over such a value, but not use it.

use serde_json::Value;

/// The first and the last character of a note: Unicode noncharacters, which do not occur in text.
const MARKS: [char; 2] = ['\u{fdd3}', '\u{fdd4}'];

/// Returns the note for a value, which says what is wrong with it.
pub(crate) fn note(what: &str) -> Value {
    let [open, close] = MARKS;
    Value::String(format!("{open}{what}{close}"))
}

/// Returns what a note says; `None` for other texts.
pub(crate) fn noted(text: &str) -> Option<&str> {
    let [open, close] = MARKS;
    text.strip_prefix(open)?.strip_suffix(close)
}
