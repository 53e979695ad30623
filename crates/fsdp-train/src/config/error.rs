//! What can be wrong with a configuration.
//!
//! Every variant says where the text came from (`origin`: a file, or the `--set` that wrote the key), which
//! key is meant (dotted, as `--set` takes it) and what would be accepted, so that one edit mends it.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// A configuration that cannot be run.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}; give the path of an existing, readable file", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The text is not TOML.
    #[error("{origin}: not valid TOML: {source}")]
    Toml {
        /// The file.
        origin: String,
        /// Line, column and reason.
        source: Box<toml::de::Error>,
    },
    /// A file that extends itself, perhaps by way of others.
    #[error("{origin}: `extends` leads back to {}; take it out of one of the files", file.display())]
    ExtendsItself {
        /// The file that says so.
        origin: String,
        /// The file that was read already.
        file: PathBuf,
    },
    /// The text is not JSON.
    #[error("{origin}: not valid JSON: {source}")]
    Json {
        /// The file.
        origin: String,
        /// Line, column and reason.
        source: serde_json::Error,
    },
    /// An argument of `--set` that is not `table.key=value`.
    #[error("--set {argument}: expected table.key=value, such as --set train.steps=100")]
    Override {
        /// The argument as given.
        argument: String,
    },
    /// A key that does not exist.
    #[error("{origin}: unknown key `{key}`; {}", suggestion(nearest.as_deref(), known))]
    UnknownKey {
        /// Where it was written.
        origin: String,
        /// The key, dotted.
        key: String,
        /// The known key it resembles most, dotted, if any is near.
        nearest: Option<String>,
        /// The keys that this table has.
        known: Vec<String>,
    },
    /// A value of the wrong type or outside its range.
    #[error("{origin}: `{key}` is {value}; it must be {allowed}")]
    Value {
        /// Where it was written.
        origin: String,
        /// The key, dotted.
        key: String,
        /// The value, as written.
        value: String,
        /// What is accepted.
        allowed: String,
    },
    /// A pattern that is no regular expression.
    #[error("{origin}: `{key}`: \"{pattern}\" is not a regular expression: {}", reason(fault))]
    Pattern {
        /// Where it was written.
        origin: String,
        /// The key, dotted.
        key: String,
        /// The pattern.
        pattern: String,
        /// Why; a part of the message, because as a cause it would be drawn over several lines.
        fault: Box<regex::Error>,
    },
    /// A key without a default is absent.
    #[error("{origin}: `{key}` is missing; set it to {allowed}")]
    Missing {
        /// The file.
        origin: String,
        /// The key, dotted.
        key: String,
        /// What is accepted.
        allowed: String,
    },
    /// Two keys that exclude each other.
    #[error("{origin}: `{first}` and `{second}` exclude each other: {remedy}")]
    Conflict {
        /// Where they were written.
        origin: String,
        /// The key that remains if the other is removed, dotted.
        first: String,
        /// The other key, dotted.
        second: String,
        /// What to do.
        remedy: &'static str,
    },
    /// Two integers of which one must divide the other.
    #[error(
        "{origin}: `{divisor_key}` = {divisor} does not divide {dividend_key} = {dividend}; \
         change one of the two"
    )]
    Divisibility {
        /// Where they were written.
        origin: String,
        /// The key that must divide, dotted.
        divisor_key: &'static str,
        /// Its value.
        divisor: u64,
        /// What must be divisible: a key, or a quantity derived from keys.
        dividend_key: &'static str,
        /// Its value.
        dividend: u64,
    },
}

/// The last line of a parser's message, which is drawn over several.
fn reason(fault: &regex::Error) -> String {
    let text = fault.to_string();
    let last = text.lines().last().unwrap_or_default();
    last.strip_prefix("error: ").unwrap_or(last).to_owned()
}

fn suggestion(nearest: Option<&str>, known: &[String]) -> String {
    match nearest {
        Some(key) => format!("did you mean `{key}`?"),
        None => format!("known keys here: {}", known.join(", ")),
    }
}
