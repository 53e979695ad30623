//! Conversations, as records have them.

use serde_json::{Map, Value};

/// The role whose messages a model is to learn.
const ASSISTANT: &str = "assistant";

/// Messages, and what a template is told beside them.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::data) struct Conversation {
    /// The messages, at least one.
    pub(super) messages: Vec<Value>,
    /// Messages before this one are a prompt: they do not count.
    pub(super) prompt: usize,
    /// What the record has beside the messages: `tools`, and the fields of `chat_template_kwargs`.
    pub(super) context: Map<String, Value>,
}

impl Conversation {
    /// Takes a value for messages, of which the first `prompt` are only read.
    ///
    /// # Errors
    /// What is wrong with them, in words.
    pub(in crate::data) fn new(
        messages: Vec<Value>,
        prompt: usize,
        context: Map<String, Value>,
    ) -> Result<Conversation, String> {
        if messages.is_empty() {
            return Err("holds no message".to_owned());
        }
        let numbered = messages.into_iter().enumerate();
        let messages = numbered.map(|(index, message)| {
            checked(message).map_err(|fault| format!("message {} {fault}", index + 1))
        });
        Ok(Conversation { messages: messages.collect::<Result<_, _>>()?, prompt, context })
    }

    /// The indices of the messages that count.
    pub(super) fn answers(&self) -> impl Iterator<Item = usize> {
        (self.prompt..self.messages.len()).filter(|&index| self.messages[index]["role"] == ASSISTANT)
    }
}

/// What a record says of its conversation beside the messages.
///
/// # Errors
/// A field of another type.
pub(in crate::data) fn context(record: &mut Map<String, Value>) -> Result<Map<String, Value>, String> {
    let mut context = match record.remove("chat_template_kwargs") {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(fields)) => fields,
        Some(_) => return Err("\"chat_template_kwargs\" must be an object".to_owned()),
    };
    let tools = match record.remove("tools") {
        // Tables whose columns have one type each keep tools, which have many, as text.
        Some(Value::String(json)) => {
            serde_json::from_str(&json).map_err(|fault| format!("\"tools\": {fault}"))?
        }
        tools => tools.unwrap_or_default(),
    };
    match tools {
        Value::Null => {}
        Value::Array(_) => drop(context.insert("tools".to_owned(), tools)),
        _ => return Err("\"tools\" must be a list".to_owned()),
    }
    Ok(context)
}

/// A message with a role, and something to say. Fields that are null are left out, because a table has all columns in all
/// rows, and templates ask whether there is such a field; but the content of a call of tools may be null.
fn checked(message: Value) -> Result<Value, String> {
    let Value::Object(mut message) = message else {
        return Err("is no object with role and content".to_owned());
    };
    message.retain(|name, value| name == "content" || !value.is_null());
    let role = match message.get("role") {
        Some(Value::String(role)) if !role.is_empty() => role,
        _ => return Err("has no role, such as \"user\" or \"assistant\"".to_owned()),
    };
    match message.get("content") {
        Some(Value::String(_) | Value::Array(_) | Value::Object(_)) => {}
        None | Some(Value::Null) if message.contains_key("tool_calls") => {}
        None | Some(Value::Null) => return Err(format!("(of role \"{role}\") has no content")),
        Some(_) => {
            return Err(format!(
                "(of role \"{role}\") has a content that is neither text nor a list of parts"
            ));
        }
    }
    Ok(Value::Object(message))
}

#[cfg(test)]
mod tests;
