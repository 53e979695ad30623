//! Turns records into tokens. Only this module interprets the fields of a record.

use serde_json::{Map, Value};

use super::chat::{Chats, Conversation, EncodeFault, Marked, Script, completion, context, messages};
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

/// What can be made of a record without a chat template.
pub(super) enum Read {
    /// Its tokens.
    Document(EncodedDocument),
    /// A conversation as JSON, for [`Chats::scripts`].
    Conversation(Vec<u8>),
}

impl Encoder<'_> {
    /// Returns the tokens of a record, or the conversation in it.
    ///
    /// # Errors
    /// A description of what is wrong with the record.
    pub(super) fn read(&self, record: Record) -> Result<Read, String> {
        match record {
            Record::Text(text) => self.text(&text).map(Read::Document),
            Record::Tokens(ids) => Ok(Read::Document(EncodedDocument { ids, form: Form::Ids })),
            Record::Object(object) => self.object(object),
        }
    }

    /// Returns the tokens of a conversation.
    ///
    /// # Errors
    /// [`EncodeFault`].
    pub(super) fn conversation(&self, script: &Script) -> Result<EncodedDocument, EncodeFault> {
        let (marked, is_open) = self.chats.tokens(script, self.tokenizer)?;
        let form = if is_open { Form::OpenConversation } else { Form::Conversation };
        Ok(EncodedDocument::from_marked(marked, form))
    }

    fn object(&self, object: Map<String, Value>) -> Result<Read, String> {
        let keys: Vec<String> = names(&object).into_iter().map(str::to_owned).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        match self.fields.choose(&keys)? {
            Chosen::One(name) => self.single_field(name, object),
            Chosen::Pair(names) => self.pair(names, object),
        }
    }

    fn single_field(&self, name: &str, mut object: Map<String, Value>) -> Result<Read, String> {
        let field_fault = |fault: String| format!("\"{name}\" {fault}");
        let is_conversation = [MESSAGES, CONVERSATIONS].contains(&name);
        match object.remove(name).unwrap_or_default() {
            Value::Array(list) if is_conversation || list.first().is_some_and(Value::is_object) => {
                let messages = messages(list, &object).map_err(field_fault)?;
                conversation(messages, 0, context(&mut object)?).map_err(field_fault)
            }
            value if is_conversation => {
                Err(field_fault(format!("is {}, but must be a list of messages", kind(&value))))
            }
            value => self.value(&value).map(Read::Document).map_err(field_fault),
        }
    }

    fn pair(&self, [prompt, answer]: [&str; 2], mut object: Map<String, Value>) -> Result<Read, String> {
        match [prompt, answer].map(|name| object.remove(name).unwrap_or_default()) {
            [Value::String(prompt), Value::String(answer)] => {
                let marked = completion(&prompt, &answer, self.chats.loss_on(), self.tokenizer)?;
                Ok(Read::Document(EncodedDocument::from_marked(marked, Form::Completion)))
            }
            [Value::Array(mut messages), Value::Array(answers)] => {
                let prompt_len = messages.len();
                messages.extend(answers);
                let field_fault = |fault| format!("\"{prompt}\" {fault}");
                conversation(messages, prompt_len, context(&mut object)?).map_err(field_fault)
            }
            [first, second] => Err(format!(
                "\"{prompt}\" is {} and \"{answer}\" is {}; both must be strings, or both lists of messages",
                kind(&first),
                kind(&second)
            )),
        }
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

/// Checks messages, of which the first `prompt` do not count in the loss.
fn conversation(messages: Vec<Value>, prompt: usize, context: Map<String, Value>) -> Result<Read, String> {
    Conversation::new(messages, prompt, context)?.to_json().map(Read::Conversation)
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
