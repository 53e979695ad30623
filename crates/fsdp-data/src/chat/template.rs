//! Chat templates, rendered as transformers renders them (`apply_chat_template`, version 5).

mod generation;
mod odd;
mod python;

use std::error::Error as _;

use chrono::{NaiveDate, NaiveTime};
use minijinja::value::ValueKind;
use minijinja::{Environment, Error, ErrorKind, Value};
use minijinja_contrib::pycompat;
use serde::Serialize;
use serde_json::Value as Json;

use odd::Odd;

use super::fault::{FUEL, RenderFault, shown};
use super::rendered::Rendered;
use crate::record;

/// Name of the template in its environment. It has no file extension that would enable HTML escaping.
const NAME: &str = "chat template";

/// A value as the template engine holds it, which is cheap to clone.
pub(crate) type Prepared = Value;

/// A chat template.
#[derive(Debug)]
pub(crate) struct ChatTemplate {
    environment: Environment<'static>,
    has_generation: bool,
}

/// The message of `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

/// Hands a value to the template engine. It may not use what has no JSON form.
pub(super) fn prepare(json: &Json) -> Prepared {
    match json {
        Json::String(text) => {
            let odd = record::odd::noted(text).map(|what| Value::from_object(Odd(what.to_owned())));
            odd.unwrap_or_else(|| Value::from(text.as_str()))
        }
        Json::Array(items) => items.iter().map(prepare).collect(),
        Json::Object(fields) => fields.iter().map(|(name, value)| (name.as_str(), prepare(value))).collect(),
        Json::Null | Json::Bool(_) | Json::Number(_) => Value::from_serialize(json),
    }
}

impl ChatTemplate {
    /// Compiles a template. `strftime_now` formats `date` instead of the current time, which would make the tokens of
    /// the same data change from day to day. Without a date, a template cannot call it.
    ///
    /// # Errors
    /// If the text is not a template: line, column and reason.
    pub(crate) fn parse(source: &str, date: Option<&str>) -> Result<ChatTemplate, String> {
        let date = date.and_then(|date| date.parse().ok());
        let (source, has_generation) = generation::rewrite(source);
        let mut environment = environment(date);
        environment.add_template_owned(NAME, source.clone()).map_err(|fault| {
            let start = fault.range().map_or(0, |range| range.start.min(source.len()));
            let column =
                source.get(..start).map_or(0, |text| text.chars().rev().take_while(|&c| c != '\n').count());
            format!("line {}, column {}: {}", fault.line().unwrap_or(1), column + 1, reason(&fault))
        })?;
        Ok(ChatTemplate { environment, has_generation })
    }

    /// Whether the template marks the assistant's text itself.
    pub(crate) fn has_generation(&self) -> bool {
        self.has_generation
    }

    /// Renders a context: `messages`, `tools`, special tokens and so on.
    ///
    /// # Errors
    /// [`RenderFault`].
    pub(crate) fn render(&self, context: &impl Serialize) -> Result<Rendered, RenderFault> {
        let template = self.environment.get_template(NAME).expect("it was added when it was parsed");
        // What another template has used does not matter.
        odd::take_used();
        let rendered = template.render(context);
        if let Some(what) = odd::take_used() {
            return Err(RenderFault::Odd(shown(what)));
        }
        let marked = rendered.map_err(|fault| render_fault(&fault))?;
        let is_mark = |c: &char| generation::MARKS.contains(c);
        if let Some(mark) = marked.chars().find(is_mark) {
            // Only blocks of the template may write marks; the context must not contain any.
            let json = serde_json::to_string(context).unwrap_or_default();
            if !self.has_generation || json.chars().any(|c| is_mark(&c)) {
                return Err(RenderFault::Noncharacter(mark.into()));
            }
        }
        Ok(generation::unmark(&marked))
    }
}

/// Sets up Jinja as transformers does.
fn environment(date: Option<NaiveDate>) -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(pycompat::unknown_method_callback);
    environment.set_formatter(|out, _, value| Ok(out.write_str(&python::text(value))?));
    environment.add_filter("tojson", python::tojson);
    environment.add_filter("string", |value: &Value| python::text(value));
    environment.add_filter("trim", |value: &Value, chars: Option<String>| {
        let is_trimmed =
            |c: char| chars.as_ref().map_or_else(|| c.is_whitespace(), |chars| chars.contains(c));
        python::text(value).trim_matches(is_trimmed).to_owned()
    });
    // In Python, strings and dictionaries are sequences and have a length.
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map)
    });
    environment.add_test("iterable", |value: &Value| {
        !matches!(value.kind(), ValueKind::None | ValueKind::Bool | ValueKind::Number | ValueKind::Plain)
    });
    environment.add_filter(generation::FILTER, generation::mark);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, "raised").with_source(Raised(message)))
    });
    if let Some(date) = date {
        environment.add_function("strftime_now", move |format: &str| strftime(date, format));
    }
    environment
}

/// Formats the first moment of a day as Python's `strftime` does.
fn strftime(date: NaiveDate, format: &str) -> Result<String, Error> {
    let mut text = String::new();
    let result = std::fmt::write(&mut text, format_args!("{}", date.and_time(NaiveTime::MIN).format(format)));
    result.map_err(|_| {
        Error::new(ErrorKind::InvalidOperation, format!("strftime_now does not support \"{format}\""))
    })?;
    Ok(text)
}

fn render_fault(fault: &Error) -> RenderFault {
    let mut cause: Option<&dyn std::error::Error> = Some(fault);
    while let Some(fault) = cause {
        if let Some(Raised(message)) = fault.downcast_ref() {
            return RenderFault::Rejected(shown(message.clone()));
        }
        cause = fault.source();
    }
    match fault.kind() {
        ErrorKind::OutOfFuel => RenderFault::Endless,
        ErrorKind::UnknownFunction if reason(fault).contains("strftime_now") => RenderFault::Date,
        _ => RenderFault::Failed { line: fault.line().unwrap_or(1), reason: reason(fault) },
    }
}

/// Returns the engine's error message, without the name and the line of the template.
fn reason(fault: &Error) -> String {
    let inner = fault.source().map_or(String::new(), |source| format!(": {source}"));
    shown(match fault.detail() {
        Some(detail) => format!("{}: {detail}{inner}", fault.kind()),
        None => format!("{}{inner}", fault.kind()),
    })
}

#[cfg(test)]
mod tests;
