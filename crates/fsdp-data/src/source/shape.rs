//! Which parts of a column have no counterpart in JSON.

use std::fmt::Display;

use serde_json::Value;

use crate::record::{no_json, odd};

/// Fields of messages that this crate reads itself, and does not only pass on to a chat template: the marks of messages, and what
/// stands for role and content.
const MARKS: [&str; 4] = ["weight", "train", "training", "train_detail"];
const USUAL: [&str; 2] = ["role", "content"];
const SHAREGPT: [&str; 2] = ["from", "value"];

/// The shape of a column or of a part of it. Formats have more types than these, but only their values tell them apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// All of its values have JSON forms.
    Json,
    /// Bytes, which are text if they are UTF-8, at a place.
    Bytes(String),
    /// Values that have no JSON form; says why.
    Odd(String),
    /// Lists.
    List(Box<Shape>),
    /// Maps from text.
    Map(Box<Shape>),
    /// Objects with these fields.
    Object(Vec<(String, Shape)>),
}

/// A shape of which no part is odd.
static JSON: Shape = Shape::Json;

impl Shape {
    /// The shape of values of a type that JSON does not have.
    pub(super) fn odd(place: &str, kind: impl Display) -> Shape {
        Shape::Odd(format!("column \"{place}\" {}", no_json(kind)))
    }

    /// The shape of maps whose keys are not text.
    pub(super) fn odd_map(place: &str) -> Shape {
        Shape::Odd(format!("column \"{place}\" {KEYS}"))
    }

    pub(super) fn list(items: Shape) -> Shape {
        if items == Shape::Json { Shape::Json } else { Shape::List(Box::new(items)) }
    }

    pub(super) fn map(values: Shape) -> Shape {
        if values == Shape::Json { Shape::Json } else { Shape::Map(Box::new(values)) }
    }

    pub(super) fn object(fields: Vec<(String, Shape)>) -> Shape {
        let is_json = fields.iter().all(|(_, shape)| *shape == Shape::Json);
        if is_json { Shape::Json } else { Shape::Object(fields) }
    }

    /// The shape of the items of a list or of the values of a map.
    pub(super) fn items(&self) -> &Shape {
        match self {
            Shape::List(items) | Shape::Map(items) => items,
            other => other,
        }
    }

    /// The shape of a field of an object, by its index.
    pub(super) fn field(&self, index: usize) -> &Shape {
        match self {
            Shape::Object(fields) => fields.get(index).map_or(&JSON, |(_, shape)| shape),
            // The library and this crate may see old forms of lists differently.
            Shape::List(items) => items.field(index),
            _ => &JSON,
        }
    }

    /// Returns what is wrong with the first odd part of a column that is used whatever the chat template is.
    pub(super) fn fault(&self) -> Option<&str> {
        match self {
            Shape::Odd(fault) => Some(fault),
            Shape::List(items) => match &**items {
                Shape::Object(fields) => message_fault(fields),
                items => items.fault(),
            },
            Shape::Map(values) => values.fault(),
            Shape::Json | Shape::Bytes(_) | Shape::Object(_) => None,
        }
    }

    /// Returns the text of bytes in its JSON form.
    ///
    /// # Errors
    /// The index of the first byte that is not UTF-8, if the place of the bytes is unknown.
    pub(super) fn text(&self, text: Result<String, usize>) -> Result<Value, String> {
        match (text, self) {
            (Ok(text), _) => Ok(Value::String(text)),
            (Err(at), Shape::Bytes(place)) => Ok(odd::note(&not_text(place, at))),
            (Err(at), _) => Err(format!("is not UTF-8 text (byte {at})")),
        }
    }
}

/// Returns what is wrong with the first odd field of messages that is read here.
fn message_fault(fields: &[(String, Shape)]) -> Option<&str> {
    let has = |name: &str| fields.iter().any(|(other, _)| other == name);
    let others = if has(SHAREGPT[0]) && !has(USUAL[0]) { SHAREGPT } else { USUAL };
    fields.iter().find_map(|(name, shape)| match shape {
        Shape::Odd(fault) if MARKS.iter().chain(&others).any(|read| read == name) => Some(fault.as_str()),
        _ => None,
    })
}

/// What is wrong with bytes that are not text.
pub(super) fn not_text(column: &str, at: usize) -> String {
    format!("column \"{column}\" is not UTF-8 text (byte {at})")
}

/// What is wrong with a map that is not an object of JSON.
pub(super) const KEYS: &str = "has keys that are not text";

#[cfg(test)]
mod tests;
