//! Turns records into tokens. Only this module interprets the fields of a record.

use serde_json::{Map, Value};

use super::chat::{Chats, Conversation, Marked, completion, context, messages};
use super::error::DataError;
use super::record::{CONVERSATIONS, Chosen, Fields, MESSAGES, Record, names};
use super::special::Form;
use super::tokenizer::Tokenizer;
use super::tokens::IGNORED_BIT;

/// Turns records into tokens.
pub(super) struct Encoder<'a> {
    /// Tokenizes text.
    pub(super) tokenizer: &'a Tokenizer,
    /// The fields that make up the document.
    pub(super) fields: Fields,
    /// Tokenizes conversations.
    pub(super) chats: Chats,
}

/// The tokens of a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EncodedDocument {
    /// Token ids, with [`IGNORED_BIT`] set in those that do not count in the loss.
    pub(super) ids: Vec<u32>,
    /// The form of the document.
    pub(super) form: Form,
}

impl EncodedDocument {
    fn from_marked(Marked { ids, counts }: Marked, form: Form) -> EncodedDocument {
        let mark = |(id, counts): (u32, bool)| if counts { id } else { id | IGNORED_BIT };
        EncodedDocument { ids: ids.into_iter().zip(counts).map(mark).collect(), form }
    }
}

/// Reasons why a record has no tokens.
#[derive(Debug, thiserror::Error)]
pub(super) enum EncodeFault {
    /// The fault is not in the record: no record of this kind can be tokenized.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The record is at fault; describes why.
    #[error("{0}")]
    Record(String),
}

impl From<String> for EncodeFault {
    fn from(fault: String) -> EncodeFault {
        EncodeFault::Record(fault)
    }
}

impl Encoder<'_> {
    /// Returns the tokens of a record.
    ///
    /// # Errors
    /// [`EncodeFault`].
    pub(super) fn encode(&self, record: Record) -> Result<EncodedDocument, EncodeFault> {
        match record {
            Record::Text(text) => Ok(self.text(&text)?),
            Record::Tokens(ids) => Ok(EncodedDocument { ids, form: Form::Ids }),
            Record::Object(object) => self.object(object),
        }
    }

    fn object(&self, object: Map<String, Value>) -> Result<EncodedDocument, EncodeFault> {
        let keys: Vec<String> = names(&object).into_iter().map(str::to_owned).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        match self.fields.choose(&keys)? {
            Chosen::One(name) => self.single_field(name, object),
            Chosen::Pair(names) => self.pair(names, object),
        }
    }

    fn single_field(
        &self,
        name: &str,
        mut object: Map<String, Value>,
    ) -> Result<EncodedDocument, EncodeFault> {
        let field_fault = |fault: String| EncodeFault::Record(format!("\"{name}\" {fault}"));
        let is_conversation = [MESSAGES, CONVERSATIONS].contains(&name);
        match object.remove(name).unwrap_or_default() {
            Value::Array(list) if is_conversation || list.first().is_some_and(Value::is_object) => {
                let messages = messages(list, &object).map_err(field_fault)?;
                self.conversation(Conversation::new(messages, 0, context(&mut object)?).map_err(field_fault)?)
            }
            value if is_conversation => {
                Err(field_fault(format!("is {}, but must be a list of messages", kind(&value))))
            }
            value => Ok(self.value(&value).map_err(field_fault)?),
        }
    }

    fn pair(
        &self,
        [prompt, answer]: [&str; 2],
        mut object: Map<String, Value>,
    ) -> Result<EncodedDocument, EncodeFault> {
        match [prompt, answer].map(|name| object.remove(name).unwrap_or_default()) {
            [Value::String(prompt), Value::String(answer)] => {
                let marked = completion(&prompt, &answer, self.chats.loss_on(), self.tokenizer)?;
                Ok(EncodedDocument::from_marked(marked, Form::Completion))
            }
            [Value::Array(mut messages), Value::Array(answers)] => {
                let prompt_len = messages.len();
                messages.extend(answers);
                let field_fault = |fault| EncodeFault::Record(format!("\"{prompt}\" {fault}"));
                self.conversation(
                    Conversation::new(messages, prompt_len, context(&mut object)?).map_err(field_fault)?,
                )
            }
            [first, second] => Err(EncodeFault::Record(format!(
                "\"{prompt}\" is {} and \"{answer}\" is {}; both must be strings, or both lists of messages",
                kind(&first),
                kind(&second)
            ))),
        }
    }

    fn conversation(&self, conversation: Conversation) -> Result<EncodedDocument, EncodeFault> {
        let (marked, is_open) = self.chats.encode(&conversation, self.tokenizer)?;
        let form = if is_open { Form::OpenConversation } else { Form::Conversation };
        Ok(EncodedDocument::from_marked(marked, form))
    }

    fn value(&self, value: &Value) -> Result<EncodedDocument, String> {
        match value {
            Value::String(text) => self.text(text),
            Value::Array(items) => {
                Ok(EncodedDocument { ids: items.iter().map(id).collect::<Result<_, _>>()?, form: Form::Ids })
            }
            other => Err(format!("is {}, but must be a string or a list of token ids", kind(other))),
        }
    }

    fn text(&self, text: &str) -> Result<EncodedDocument, String> {
        let ids = self.tokenizer.encode(text).map_err(|fault| format!("it cannot be tokenized: {fault}"))?;
        Ok(EncodedDocument { ids, form: Form::Text })
    }
}

/// Reads a token id, which must leave the highest of 32 bits free for marking tokens that do not count.
fn id(item: &Value) -> Result<u32, String> {
    let id = item.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|&id| id < IGNORED_BIT);
    id.ok_or_else(|| {
        let got = if item.is_number() { item.to_string() } else { kind(item).to_owned() };
        format!("contains {got}, but must be a string or a list of token ids, integers from 0 to 2147483647")
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
