//! Patterns over parameter names, for `fsdp.frozen` and `no_decay`.
//!
//! A pattern is a regular expression that may match anywhere in the fully qualified name, so `bias` means what it means
//! in every training script. `^` and `$` anchor it (`layers.1` also matches `layers.10`).

use regex::Regex;

/// Compiled patterns over fully qualified parameter names.
#[derive(Clone, Debug)]
pub struct FqnPatterns {
    patterns: Vec<Regex>,
}

impl FqnPatterns {
    /// Compiles the patterns of a resolved configuration.
    ///
    /// # Errors
    /// If a pattern is not a regular expression, which cannot happen for a resolved configuration.
    pub fn new(patterns: &[String]) -> Result<FqnPatterns, regex::Error> {
        let patterns = patterns.iter().map(|pattern| Regex::new(pattern)).collect::<Result<_, _>>()?;
        Ok(FqnPatterns { patterns })
    }

    /// Whether any pattern matches the name.
    pub fn matches(&self, fqn: &str) -> bool {
        self.patterns.iter().any(|pattern| pattern.is_match(fqn))
    }

    /// Returns the patterns that match none of the names, which are most likely mistakes.
    pub fn unused<'a>(&'a self, fqns: &[&str]) -> Vec<&'a str> {
        let unused = |pattern: &&Regex| !fqns.iter().any(|fqn| pattern.is_match(fqn));
        self.patterns.iter().filter(unused).map(Regex::as_str).collect()
    }
}
