//! Patterns over parameter names, for `fsdp.frozen` and `no_decay`.
//!
//! A pattern is a regular expression found anywhere in the fully qualified name, so that `bias` means what
//! it means in every training script; `^` and `$` tie it to the ends (`layers.1` is also in `layers.10`).

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
