//! Conversations, as found in records.

use fsdp_config::LossOn;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::learned::{self, mark};
use super::sharegpt;

/// Names of the fields of a template's context that do not come from the record.
pub(super) const MESSAGES: &str = "messages";
pub(super) const TOOLS: &str = "tools";
pub(super) const PROMPT: &str = "add_generation_prompt";

/// Maximum size of a conversation as JSON. The longest contexts of models are some megabytes.
const BYTES_MAX: usize = 16 << 20;

/// The role whose messages the model learns.
pub(super) const ASSISTANT: &str = "assistant";

/// Messages, and the other variables that the record has for a template.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Conversation {
    /// The messages, at least one.
    pub(super) messages: Vec<Value>,
    /// Whether each message counts in the loss, by its own marks.
    marks: Vec<Option<bool>>,
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
    pub(crate) fn new(
        messages: Vec<Value>,
        prompt: usize,
        context: Map<String, Value>,
    ) -> Result<Conversation, String> {
        if messages.is_empty() {
            return Err("has no messages".to_owned());
        }
        let numbered = messages.into_iter().enumerate();
        let checked = numbered.map(|(index, message)| {
            checked(message).map_err(|fault| format!("message {} {fault}", index + 1))
        });
        let checked: Vec<(Value, Option<bool>)> = checked.collect::<Result<_, _>>()?;
        let (messages, marks) = checked.into_iter().unzip();
        Ok(Conversation { messages, marks, prompt, context })
    }

    /// Returns the conversation as JSON.
    ///
    /// # Errors
    /// If it is longer than a conversation may be.
    pub(crate) fn to_json(&self) -> Result<Vec<u8>, String> {
        let json = serde_json::to_vec(self).map_err(|fault| fault.to_string())?;
        if json.len() <= BYTES_MAX {
            return Ok(json);
        }
        Err(format!(
            "has {} bytes as JSON; the maximum for a conversation is {BYTES_MAX}: is it more than one?",
            json.len()
        ))
    }

    /// Checks that the marks of all messages can be followed.
    ///
    /// # Errors
    /// A description of the first that cannot.
    pub(super) fn check_marks(&self, loss_on: LossOn) -> Result<(), String> {
        let numbered = (1..).zip(self.messages.iter().zip(&self.marks));
        for (number, (message, mark)) in numbered {
            let role = message["role"].as_str().unwrap_or_default();
            learned::check(*mark, role, loss_on).map_err(|fault| format!("message {number} {fault}"))?;
        }
        Ok(())
    }

    /// Returns the indices of the assistant's messages after the prompt, and whether each counts in the loss.
    pub(super) fn answers(&self, loss_on: LossOn) -> Vec<(usize, bool)> {
        let is_from = |role: &'static str| move |&index: &usize| self.messages[index]["role"] == role;
        let answers: Vec<usize> = (self.prompt..self.messages.len()).filter(is_from(ASSISTANT)).collect();
        let first = match loss_on {
            LossOn::All | LossOn::Answers => 0,
            LossOn::LastAnswer => {
                let last = answers.last().copied().unwrap_or(0);
                (0..last).rev().find(is_from("user")).unwrap_or(0)
            }
        };
        answers.into_iter().map(|index| (index, index >= first && self.marks[index] != Some(false))).collect()
    }
}

/// Returns the messages of a list, which may be in ShareGPT's form.
///
/// # Errors
/// A description of what is wrong with them.
pub(crate) fn messages(list: Vec<Value>, record: &Map<String, Value>) -> Result<Vec<Value>, String> {
    if !sharegpt::is_sharegpt(&list) {
        return Ok(list);
    }
    sharegpt::rewrite(list, record.get("system").unwrap_or(&Value::Null))
}

/// Takes the template variables other than messages out of a record.
///
/// # Errors
/// If a field has the wrong type.
pub(crate) fn context(record: &mut Map<String, Value>) -> Result<Map<String, Value>, String> {
    let mut context = match record.remove("chat_template_kwargs") {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(fields)) => fields,
        Some(_) => return Err("\"chat_template_kwargs\" must be an object".to_owned()),
    };
    let tools = match record.remove("tools") {
        // Columnar formats have one type per column, so tools, whose types vary, are stored there as text.
        Some(Value::String(json)) if json.is_empty() => Value::Null,
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

/// Checks that a message has a role and content, and returns it with its mark. Null fields are
/// dropped, because templates test whether a field exists. The content of a message with tool calls may be null.
fn checked(message: Value) -> Result<(Value, Option<bool>), String> {
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
    let mark = mark(&message)?;
    Ok((Value::Object(message), mark))
}

#[cfg(test)]
mod tests;
