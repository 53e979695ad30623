//! Patterns over parameter names, for `fsdp.frozen` and `no_decay`.
//!
//! A pattern is a regular expression found anywhere in the fully qualified name, so that `bias` means what
//! it means in every training script; `^` and `$` tie it to the ends (`layers.1` is also in `layers.10`).

use regex::Regex;

use super::error::ConfigError;
use super::kind::{Kind, TEXTS};
use super::reader::Reader;

const PATTERNS: Kind<Vec<String>> = Kind {
    allowed: "a list of regular expressions over parameter names, such as [\"bias\", \"norm\\\\.weight$\"]",
    read: TEXTS.read,
};

/// The patterns under a key, none if absent.
///
/// # Errors
/// [`ConfigError::Value`] for something else than a list of strings, [`ConfigError::Pattern`] for the first
/// that is no regular expression.
pub(super) fn read(reader: &Reader<'_>, key: &'static str) -> Result<Vec<String>, ConfigError> {
    let patterns = reader.or(key, PATTERNS, Vec::new())?;
    for pattern in &patterns {
        if let Err(fault) = Regex::new(pattern) {
            return Err(reader.bad_pattern(key, pattern, fault));
        }
    }
    Ok(patterns)
}

/// Compiled patterns over fully qualified parameter names.
#[derive(Clone, Debug)]
pub struct FqnPatterns {
    patterns: Vec<Regex>,
}

impl FqnPatterns {
    /// Compiles the patterns of a resolved configuration.
    ///
    /// # Errors
    /// If one is not a regular expression; a resolved configuration has none such.
    pub fn new(patterns: &[String]) -> Result<FqnPatterns, regex::Error> {
        let patterns = patterns.iter().map(|pattern| Regex::new(pattern)).collect::<Result<_, _>>()?;
        Ok(FqnPatterns { patterns })
    }

    /// Whether any pattern is found in the name.
    pub fn matches(&self, fqn: &str) -> bool {
        self.patterns.iter().any(|pattern| pattern.is_match(fqn))
    }

    /// The patterns that are found in none of the names: most likely mistakes.
    pub fn unused<'a>(&'a self, fqns: &[&str]) -> Vec<&'a str> {
        let unused = |pattern: &&Regex| !fqns.iter().any(|fqn| pattern.is_match(fqn));
        self.patterns.iter().filter(unused).map(Regex::as_str).collect()
    }
}
