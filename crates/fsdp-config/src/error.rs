//! Errors in a configuration.
//!
//! An error names the origin of the text (`origin`: a file, or the `--set` that wrote the key), the key (dotted, as
//! `--set` takes it) and the accepted values, so that one edit fixes it.

use std::io;
use std::path::PathBuf;

use fsdp_core::FailureKind;
use thiserror::Error;

/// A configuration that cannot be run.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}; give the path of an existing, readable file", file.display())]
    Read {
        /// Path of the file.
        file: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// The text is not TOML.
    #[error("{origin}: not valid TOML: {source}")]
    Toml {
        /// Name of the file.
        origin: String,
        /// Line, column and reason.
        source: Box<toml::de::Error>,
    },
    /// A file that extends itself, perhaps by way of others.
    #[error("{origin}: `extends` leads back to {}; remove it from one of the files", file.display())]
    ExtendsItself {
        /// The file whose `extends` closes the circle.
        origin: String,
        /// The file that it names, which was already read.
        file: PathBuf,
    },
    /// A chain of files that extend each other is too long.
    #[error("`extends` leads through more than {} files: {} ...; join some of them", chain.len(), chain[..3].join(" -> "))]
    ExtendsTooMany {
        /// The files, the run file first.
        chain: Vec<String>,
    },
    /// A file named by `extends` is not TOML. Its text is not quoted: it may be any file of the machine.
    #[error("{file}: `extends` of {origin} names it, but it is not a run file (line {line}: not valid TOML)")]
    NotRunFile {
        /// The file that names it.
        origin: String,
        /// The file.
        file: String,
        /// The line of the fault, from 1.
        line: usize,
    },
    /// The text is not JSON.
    #[error("{origin}: not valid JSON: {source}")]
    Json {
        /// Name of the file.
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
        /// The file or `--set` that wrote it.
        origin: String,
        /// The key, dotted.
        key: String,
        /// The most similar known key, dotted; `None` if none is similar.
        nearest: Option<String>,
        /// The keys of this table.
        known: Vec<String>,
    },
    /// A value of the wrong type or outside its range.
    #[error("{origin}: `{key}` is {value}; it must be {allowed}")]
    Value {
        /// The file or `--set` that wrote it.
        origin: String,
        /// The key, dotted.
        key: String,
        /// The value, as written.
        value: String,
        /// Description of the accepted values.
        allowed: String,
    },
    /// A pattern that is not a regular expression.
    #[error("{origin}: `{key}`: \"{pattern}\" is not a regular expression: {}", reason(fault))]
    Pattern {
        /// The file or `--set` that wrote it.
        origin: String,
        /// The key, dotted.
        key: String,
        /// The pattern, as written.
        pattern: String,
        /// The parse error. It is part of the message rather than its `source`, because as a cause it would be printed
        /// over several lines.
        fault: Box<regex::Error>,
    },
    /// A key without a default is absent.
    #[error("{origin}: `{key}` is missing; set it to {allowed}")]
    Missing {
        /// Name of the run file.
        origin: String,
        /// The key, dotted.
        key: String,
        /// Description of the accepted values.
        allowed: String,
    },
    /// Two keys that exclude each other.
    #[error("{origin}: `{first}` and `{second}` exclude each other: {remedy}")]
    Conflict {
        /// The file or `--set` that wrote them.
        origin: String,
        /// The key that remains if the other is removed, dotted.
        first: String,
        /// The other key, dotted.
        second: String,
        /// How to resolve the conflict.
        remedy: &'static str,
    },
    /// Two integers, one of which must divide the other.
    #[error(
        "{origin}: `{divisor_key}` = {divisor} does not divide {dividend_key} = {dividend}; \
         the nearest that does is {}, or change the other",
        nearest_divisor(divisor_key, *divisor, *dividend)
    )]
    Divisibility {
        /// The file or `--set` that wrote them.
        origin: String,
        /// The key that must divide the other, dotted.
        divisor_key: &'static str,
        /// Value of the divisor.
        divisor: u64,
        /// The key that must be divisible, or a quantity derived from keys.
        dividend_key: &'static str,
        /// Value of the dividend.
        dividend: u64,
    },
}

impl ConfigError {
    /// The kind of this failure.
    pub fn kind(&self) -> FailureKind {
        match self {
            ConfigError::Read { source, .. } => FailureKind::of_io(source),
            ConfigError::Toml { .. }
            | ConfigError::ExtendsItself { .. }
            | ConfigError::ExtendsTooMany { .. }
            | ConfigError::NotRunFile { .. }
            | ConfigError::Json { .. }
            | ConfigError::Override { .. }
            | ConfigError::UnknownKey { .. }
            | ConfigError::Value { .. }
            | ConfigError::Pattern { .. }
            | ConfigError::Missing { .. }
            | ConfigError::Conflict { .. }
            | ConfigError::Divisibility { .. } => FailureKind::Input,
        }
    }
}

/// The divisor of a number that is nearest to another one and allowed for a key; of two, the smaller.
fn nearest_divisor(key: &str, divisor: u64, dividend: u64) -> u64 {
    let is_power =
        key.starts_with("fsdp.chunks.") || ["fsdp.mesh.context", "fsdp.mesh.expert"].contains(&key);
    let pairs = (1..=dividend.isqrt()).filter(|factor| dividend.is_multiple_of(*factor));
    let factors = pairs.flat_map(|factor| [factor, dividend / factor]);
    let factors = factors.filter(|factor| !is_power || factor.is_power_of_two());
    factors.min_by_key(|factor| (factor.abs_diff(divisor), *factor)).unwrap_or(1)
}

/// Returns the last line of a parse error, whose message spans several lines.
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
