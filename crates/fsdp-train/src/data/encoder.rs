//! From records to tokens: the one place that knows what a field means.

use serde_json::Value;

use super::record::{Fields, Record};
use super::tokenizer::Tokenizer;

/// Makes tokens of records.
pub(super) struct Encoder<'a> {
    /// What makes tokens of text.
    pub(super) tokenizer: &'a Tokenizer,
    /// Which fields are the document.
    pub(super) fields: Fields,
}

impl Encoder<'_> {
    /// The tokens of a record.
    ///
    /// # Errors
    /// What is wrong with the record, in words.
    pub(super) fn encode(&self, record: Record) -> Result<Vec<u32>, String> {
        match record {
            Record::Text(text) => self.text(&text),
            Record::Tokens(ids) => Ok(ids),
            Record::Object(object) => {
                let names: Vec<&str> = object.keys().map(String::as_str).collect();
                let name = self.fields.choose(&names)?;
                self.value(&object[name]).map_err(|fault| format!("\"{name}\" {fault}"))
            }
        }
    }

    fn value(&self, value: &Value) -> Result<Vec<u32>, String> {
        match value {
            Value::String(text) => self.text(text),
            Value::Array(items) => items.iter().map(id).collect(),
            other => Err(format!("is {}, and must be a string or a list of token ids", kind(other))),
        }
    }

    fn text(&self, text: &str) -> Result<Vec<u32>, String> {
        self.tokenizer.encode(text).map_err(|fault| format!("it cannot be tokenized: {fault}"))
    }
}

/// A token id. The largest number of 32 bits marks targets that do not count.
fn id(item: &Value) -> Result<u32, String> {
    let id = item.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|&id| id < u32::MAX);
    id.ok_or_else(|| {
        let what = if item.is_number() { item.to_string() } else { kind(item).to_owned() };
        format!("holds {what}, and must be a string or a list of token ids, integers from 0 to 4294967294")
    })
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests;
