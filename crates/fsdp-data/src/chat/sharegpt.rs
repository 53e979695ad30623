//! ShareGPT's form of a conversation, with `from` and `value` in place of `role` and `content`.

use serde_json::{Map, Value, json};

use super::conversation::ASSISTANT;

/// The keys of a message, and those that replace them.
const ROLE: &str = "role";
const FROM: &str = "from";
const VALUE: &str = "value";

/// The name of a message that is a call of a tool, as JSON.
const CALL: &str = "function_call";

/// The names of the speakers in published data, with their roles.
const ROLES: [(&str, &str); 11] = [
    ("system", "system"),
    ("human", "user"),
    ("user", "user"),
    ("gpt", ASSISTANT),
    ("assistant", ASSISTANT),
    ("bot", ASSISTANT),
    ("chatgpt", ASSISTANT),
    ("model", ASSISTANT),
    ("tool", "tool"),
    ("observation", "tool"),
    (CALL, ASSISTANT),
];

/// Whether messages are in ShareGPT's form.
pub(super) fn is_sharegpt(messages: &[Value]) -> bool {
    messages.first().is_some_and(|first| first.get(FROM).is_some() && first.get(ROLE).is_none())
}

/// Rewrites messages to `role` and `content`, and puts the system prompt of the record before them, unless they have
/// one.
///
/// # Errors
/// A description of the message that is at fault.
pub(super) fn rewrite(messages: Vec<Value>, system: &Value) -> Result<Vec<Value>, String> {
    let numbered = messages.into_iter().enumerate();
    let rewritten = numbered.map(|(index, message)| {
        self::message(message).map_err(|fault| format!("message {} {fault}", index + 1))
    });
    let mut messages: Vec<Value> = rewritten.collect::<Result<_, _>>()?;
    match system {
        Value::String(text) if !text.is_empty() && messages[0][ROLE] != "system" => {
            messages.insert(0, json!({"role": "system", "content": text}));
        }
        Value::Null | Value::String(_) => {}
        _ => return Err("stands beside a \"system\" that is not a string".to_owned()),
    }
    Ok(messages)
}

fn message(message: Value) -> Result<Value, String> {
    let Value::Object(mut rest) = message else {
        return Err(format!("is not an object with \"{FROM}\" and \"{VALUE}\""));
    };
    let name = match rest.remove(FROM) {
        Some(Value::String(name)) => name,
        _ => return Err(format!("has no \"{FROM}\", such as \"human\" or \"gpt\"")),
    };
    let Some((_, role)) = ROLES.iter().find(|(known, _)| *known == name) else {
        let known = ROLES.map(|(name, _)| format!("\"{name}\"")).join(", ");
        return Err(format!("is from \"{name}\", which is none of the known roles: {known}"));
    };
    let mut message = Map::from_iter([(ROLE.to_owned(), json!(role))]);
    let value = rest.remove(VALUE).unwrap_or_default();
    if name == CALL {
        message.insert("content".to_owned(), json!(""));
        message.insert("tool_calls".to_owned(), calls(&value)?);
    } else {
        message.insert("content".to_owned(), value);
    }
    message.extend(rest);
    Ok(Value::Object(message))
}

/// Reads the calls of tools in a message: an object with `name` and `arguments`, or a list of such objects.
fn calls(value: &Value) -> Result<Value, String> {
    let fault = || {
        format!(
            "is from \"{CALL}\", but its \"{VALUE}\" is not JSON of an object with \"name\" and \"arguments\""
        )
    };
    let parsed = match value {
        Value::String(json) => serde_json::from_str(json).map_err(|_| fault())?,
        other => other.clone(),
    };
    let calls = match parsed {
        Value::Array(calls) if !calls.is_empty() => calls,
        call => vec![call],
    };
    let call = |call: Value| match &call["name"] {
        Value::String(_) if call.get("arguments").is_some() => {
            Ok(json!({"type": "function", "function": call}))
        }
        _ => Err(fault()),
    };
    calls.into_iter().map(call).collect()
}

#[cfg(test)]
mod tests;
