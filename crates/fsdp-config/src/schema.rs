//! The JSON schema of run files, for editors. It is derived from the same declarations as the reader.
//!
//! A file that extends another one may omit anything, so no key is required. Rules between keys, and ranges other than
//! the smallest integer, are left to `fsdp check`.

use serde_json::{Map, Value};

use super::describe::{TableSchema, ValueSchema, described};
use super::extends;
use super::kind::TEXT;
use super::resolved::Resolved;

/// Returns the schema of a run file, in draft 7, which TOML editors support.
pub fn schema() -> Value {
    let mut schema = Resolved::schema();
    let base = described(
        "Another run file, relative to this one, whose keys apply where this one has none.",
        ValueSchema::of(&TEXT),
    );
    schema["properties"][extends::KEY] = base;
    let mut document = Map::from_iter([
        ("$schema".to_owned(), "http://json-schema.org/draft-07/schema#".into()),
        ("title".to_owned(), "A run file of fsdp".into()),
    ]);
    document.extend(schema.as_object().cloned().unwrap_or_default());
    document.into()
}

#[cfg(test)]
mod tests;
