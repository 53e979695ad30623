//! Records: the output of a source, whatever its format, before tokenizing.

mod not_json;
pub(super) mod odd;

use std::fmt::{self, Display};

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, Visitor};
use serde_json::{Map, Value};

/// One document, as found in a source.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Record {
    /// A text.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
    /// The fields of an object that [`Fields`] selects, in the order of the source.
    Object(Map<String, Value>),
}

impl Record {
    /// Approximate size in memory, in bytes.
    pub(super) fn len_bytes(&self) -> usize {
        match self {
            Record::Text(text) => text.len(),
            Record::Tokens(ids) => ids.len() * size_of::<u32>(),
            Record::Object(object) => object.values().map(|value| value.to_string().len()).sum(),
        }
    }
}

/// Position of a record in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RecordPosition {
    /// The record is the whole file.
    WholeFile,
    /// A line, from 1.
    Line(u64),
    /// A row, from 0.
    Row {
        /// The row group, from 0, if the format has row groups.
        group: Option<usize>,
        /// The row within its group, or within the file if there are no groups.
        row: u64,
    },
}

impl fmt::Display for RecordPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RecordPosition::WholeFile => write!(f, "the whole file"),
            RecordPosition::Line(line) => write!(f, "line {line}"),
            RecordPosition::Row { group: Some(group), row } => write!(f, "row group {group}, row {row}"),
            RecordPosition::Row { group: None, row } => write!(f, "row {row}"),
        }
    }
}

/// The field with the messages of a conversation, which is recognized without `data.column`.
pub(super) const MESSAGES: &str = "messages";

/// The field with the messages of a conversation in ShareGPT's form.
pub(super) const CONVERSATIONS: &str = "conversations";

/// Other fields that are recognized without `data.column`, in order of preference.
const KNOWN: [&str; 2] = ["text", "input_ids"];

/// The fields of a prompt and its completion, unless `data.prompt` and `data.completion` name others.
const PAIR: [&str; 2] = ["prompt", "completion"];

/// Fields that a conversation may have besides its messages.
pub(super) const COMPANIONS: [&str; 3] = ["tools", "chat_template_kwargs", "system"];

/// What is wrong with a field that is used.
pub(super) const NOT_JSON: &str = "contains NaN or Infinity, which JSON does not have; write null or a number, or leave \
                                   such records out (data.malformed = \"skip\")";

/// What is wrong with a value of a table whose type has no counterpart in JSON.
pub(super) fn no_json(kind: impl Display) -> String {
    format!("is of type {kind}; only text, numbers, lists and objects are supported: write it as text")
}

/// Selects the fields of an object that make up its document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fields {
    /// The value of `data.column`.
    column: Option<String>,
    /// The values of `data.prompt` and `data.completion`, if at least one is set.
    pair: Option<[String; 2]>,
}

/// The fields of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Chosen<'n> {
    /// A single field.
    One(&'n str),
    /// A prompt and its completion.
    Pair([&'n str; 2]),
}

impl<'n> Chosen<'n> {
    /// Names of the fields.
    pub(super) fn names(self) -> Vec<&'n str> {
        match self {
            Chosen::One(name) => vec![name],
            Chosen::Pair(names) => names.to_vec(),
        }
    }
}

impl Fields {
    /// Selects the field that `data.column` names, or else the known fields.
    pub(super) fn new(column: Option<&str>) -> Fields {
        Fields { column: column.map(str::to_owned), pair: None }
    }

    /// Sets the values of `data.prompt` and `data.completion`.
    pub(super) fn with_pair(self, given: [Option<&str>; 2]) -> Fields {
        let [prompt, completion] = [0, 1].map(|index| given[index].unwrap_or(PAIR[index]).to_owned());
        Fields { pair: given.iter().any(Option::is_some).then_some([prompt, completion]), ..self }
    }

    /// Chooses the fields to read from those that exist.
    ///
    /// # Errors
    /// A description that lists the existing fields.
    pub(super) fn choose<'n>(&self, names: &[&'n str]) -> Result<Chosen<'n>, String> {
        let find = |field: &str| names.iter().copied().find(|name| *name == field);
        let single = |field: &str| find(field).map(Chosen::One);
        let pair = |[prompt, completion]: [&str; 2]| Some(Chosen::Pair([find(prompt)?, find(completion)?]));
        let found = match (&self.column, &self.pair) {
            (Some(column), _) => single(column),
            (None, Some([prompt, completion])) => pair([prompt, completion]),
            (None, None) => {
                let conversation = single(MESSAGES).or_else(|| single(CONVERSATIONS));
                conversation.or_else(|| pair(PAIR)).or_else(|| KNOWN.into_iter().find_map(single))
            }
        };
        found.ok_or_else(|| {
            let existing = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            match (&self.column, &self.pair) {
                (Some(column), _) => {
                    format!("there is no \"{column}\" (data.column); there are: {existing}")
                }
                (None, Some([prompt, completion])) => format!(
                    "there is no \"{prompt}\" (data.prompt) with \"{completion}\" (data.completion); there \
                     are: {existing}"
                ),
                (None, None) => format!(
                    "there is no \"messages\" or \"conversations\", no \"prompt\" with \"completion\", no \"text\" and \
                     no \"input_ids\"; set data.column to one of: {existing}"
                ),
            }
        })
    }

    fn selects(&self, name: &str) -> bool {
        let is_of_document = match (&self.column, &self.pair) {
            (Some(column), _) => column == name,
            (None, Some(pair)) => pair.iter().any(|field| field == name),
            (None, None) => {
                [MESSAGES, CONVERSATIONS].contains(&name) || PAIR.contains(&name) || KNOWN.contains(&name)
            }
        };
        is_of_document || COMPANIONS.contains(&name)
    }

    /// Parses a JSON object, and drops the fields that are not selected. Others may contain NaN and infinities.
    ///
    /// # Errors
    /// A description of what is wrong with the text.
    pub(super) fn parse(&self, json: &[u8]) -> Result<Record, String> {
        let object = self.parse_json(json).or_else(|fault| match not_json::replaced(json, b'0') {
            Some(zeros) => self.parse_replaced(json, &zeros),
            None => Err(fault),
        });
        object.map(Record::Object)
    }

    /// Parses a JSON object whose numbers that JSON does not have were replaced with zeros.
    fn parse_replaced(&self, json: &[u8], zeros: &[u8]) -> Result<Map<String, Value>, String> {
        let object = self.parse_json(zeros)?;
        let other = not_json::replaced(json, b'1').map(|ones| self.parse_json(&ones)).transpose()?;
        let used = self.choose(&names(&object))?.names();
        let is_conversation = used.iter().any(|name| object[*name].is_array());
        let companions = COMPANIONS.into_iter().filter(|_| is_conversation);
        // A field that depends on what replaced a number contains one.
        let differs = |name: &&str| other.as_ref().is_some_and(|other| object.get(*name) != other.get(*name));
        let odd = used.into_iter().chain(companions).find(differs).map(str::to_owned);
        match odd {
            None => Ok(object),
            Some(name) => Err(format!("\"{name}\" {NOT_JSON}")),
        }
    }

    fn parse_json(&self, json: &[u8]) -> Result<Map<String, Value>, String> {
        let mut parser = serde_json::Deserializer::from_slice(json);
        let parsed =
            SelectedFields(self).deserialize(&mut parser).and_then(|object| parser.end().map(|()| object));
        let object = parsed.map_err(|fault| self.explain(&fault))?;
        if self.choose(&names(&object)).is_err() {
            // The error for a missing field lists all existing ones.
            let all: Map<String, Value> =
                serde_json::from_slice(json).map_err(|fault| self.explain(&fault))?;
            self.choose(&names(&all))?;
        }
        Ok(object)
    }

    fn explain(&self, fault: &serde_json::Error) -> String {
        let column = self.column.as_deref().unwrap_or(KNOWN[0]);
        format!("{fault}; every line must be an object with a string or token ids under \"{column}\"")
    }
}

/// Names of the fields of an object.
pub(super) fn names(object: &Map<String, Value>) -> Vec<&str> {
    object.keys().map(String::as_str).collect()
}

/// Reads an object, and keeps the fields that [`Fields`] selects.
struct SelectedFields<'a>(&'a Fields);

impl<'de> DeserializeSeed<'de> for SelectedFields<'_> {
    type Value = Map<String, Value>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for SelectedFields<'_> {
    type Value = Map<String, Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
        let mut object = Map::new();
        while let Some(name) = access.next_key::<String>()? {
            if !self.0.selects(&name) {
                access.next_value::<IgnoredAny>()?;
            } else if object.contains_key(&name) {
                return Err(A::Error::custom(format_args!("duplicate field `{name}`")));
            } else {
                let value = access.next_value()?;
                object.insert(name, value);
            }
        }
        Ok(object)
    }
}

#[cfg(test)]
mod tests;
