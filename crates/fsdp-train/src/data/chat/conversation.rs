//! Conversations, as found in records.

use serde_json::{Map, Value};

/// The role whose messages the model learns.
const ASSISTANT: &str = "assistant";

/// Messages, and the other variables that the record has for a template.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::data) struct Conversation {
    /// The messages, at least one.
    pub(super) messages: Vec<Value>,
    /// Number of leading messages that form the prompt and do not count in the loss.
    pub(super) prompt: usize,
    /// Other variables of the record: `tools`, and the fields of `chat_template_kwargs`.
    pub(super) context: Map<String, Value>,
}

impl Conversation {
    /// Checks messages, of which the first `prompt` do not count in the loss.
    ///
    /// # Errors
    /// A description of what is wrong with them.
    pub(in crate::data) fn new(
        messages: Vec<Value>,
        prompt: usize,
        context: Map<String, Value>,
    ) -> Result<Conversation, String> {
        if messages.is_empty() {
            return Err("has no messages".to_owned());
        }
        let numbered = messages.into_iter().enumerate();
        let messages = numbered.map(|(index, message)| {
            checked(message).map_err(|fault| format!("message {} {fault}", index + 1))
        });
        Ok(Conversation { messages: messages.collect::<Result<_, _>>()?, prompt, context })
    }

    /// Returns the indices of the messages that count in the loss.
    pub(super) fn answers(&self) -> impl Iterator<Item = usize> {
        (self.prompt..self.messages.len()).filter(|&index| self.messages[index]["role"] == ASSISTANT)
    }
}

/// Takes the template variables other than messages out of a record.
///
/// # Errors
/// If a field has the wrong type.
pub(in crate::data) fn context(record: &mut Map<String, Value>) -> Result<Map<String, Value>, String> {
    let mut context = match record.remove("chat_template_kwargs") {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(fields)) => fields,
        Some(_) => return Err("\"chat_template_kwargs\" must be an object".to_owned()),
    };
    let tools = match record.remove("tools") {
        // Columnar formats have one type per column, so tools, whose types vary, are stored there as text.
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

/// Checks that a message has a role and content. Null fields are dropped, because every row of a table has all columns,
/// and templates test whether a field exists. The content of a message with tool calls may be null.
fn checked(message: Value) -> Result<Value, String> {
    let Value::Object(mut message) = message else {
        return Err("is not an object with role and content".to_owned());
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
            return Err(format!("(of role \"{role}\") has content that is neither text nor a list of parts"));
        }
    }
    Ok(Value::Object(message))
}

#[cfg(test)]
mod tests;
