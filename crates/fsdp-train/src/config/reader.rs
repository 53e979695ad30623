//! Reading one table of a run file: unknown keys first, then key by key with its kind.
//!
//! This is written by hand rather than derived because an error must name the dotted key, the value and
//! what is allowed, and must say whether the file or a `--set` wrote it. The domain structs derive only
//! `Serialize`.

use std::collections::BTreeSet;

use toml::{Table, Value};

use super::error::ConfigError;
use super::kind::{Kind, NONE};

/// Below this similarity (0 to 1) a suggestion would be a guess.
const SIMILARITY_MIN: f64 = 0.7;

/// Where a configuration comes from, to be named in errors.
#[derive(Clone, Debug)]
pub(super) struct Origin {
    file: String,
    overridden: BTreeSet<String>,
}

impl Origin {
    /// A file, before overrides.
    pub(super) fn new(file: &str) -> Origin {
        Origin { file: file.to_owned(), overridden: BTreeSet::new() }
    }

    /// Notes that `--set` wrote the key.
    pub(super) fn note_override(&mut self, key: &str) {
        self.overridden.insert(key.to_owned());
    }

    /// The file, or `--set` if that wrote the key or the table the key is in.
    pub(super) fn of(&self, key: &str) -> String {
        let wrote =
            |by: &String| key.strip_prefix(by.as_str()).is_some_and(|r| r.is_empty() || r.starts_with('.'));
        match self.overridden.iter().find(|by| wrote(by)) {
            Some(by) => format!("--set {by}"),
            None => self.file.clone(),
        }
    }
}

/// A table whose keys are known.
pub(super) struct Reader<'a> {
    origin: &'a Origin,
    path: String,
    table: Table,
    known: &'static [&'static str],
}

impl<'a> Reader<'a> {
    /// Opens a table; `path` is its dotted name, empty for the whole file.
    ///
    /// # Errors
    /// [`ConfigError::UnknownKey`] for the first key that is not in `known`.
    pub(super) fn open(
        origin: &'a Origin,
        path: &str,
        table: Table,
        known: &'static [&'static str],
    ) -> Result<Reader<'a>, ConfigError> {
        let reader = Reader { origin, path: path.to_owned(), table, known };
        match reader.table.keys().find(|key| !known.contains(&key.as_str())) {
            None => Ok(reader),
            Some(key) => Err(reader.unknown_key(key)),
        }
    }

    fn unknown_key(&self, key: &str) -> ConfigError {
        let dotted = self.dotted(key);
        ConfigError::UnknownKey {
            origin: self.origin.of(&dotted),
            key: dotted,
            nearest: nearest(key, self.known).map(|known| self.dotted(known)),
            known: self.known.iter().map(|&known| known.to_owned()).collect(),
        }
    }

    /// The dotted name of a key of this table.
    pub(super) fn dotted(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// The value of a key, if written.
    ///
    /// # Errors
    /// [`ConfigError::Value`] if it is not of the kind.
    pub(super) fn optional<T>(&self, key: &'static str, kind: Kind<T>) -> Result<Option<T>, ConfigError> {
        assert!(self.known.contains(&key), "`{key}` is declared before it is read");
        let Some(value) = self.table.get(key) else { return Ok(None) };
        match (kind.read)(value) {
            Some(read) => Ok(Some(read)),
            None => Err(self.rejected(key, kind.allowed)),
        }
    }

    /// The value of a key, or its default.
    ///
    /// # Errors
    /// As [`Reader::optional`].
    pub(super) fn or<T>(&self, key: &'static str, kind: Kind<T>, default: T) -> Result<T, ConfigError> {
        Ok(self.optional(key, kind)?.unwrap_or(default))
    }

    /// The value of a key, unless it is absent or `"none"`.
    ///
    /// # Errors
    /// As [`Reader::optional`].
    pub(super) fn or_none<T>(&self, key: &'static str, kind: Kind<T>) -> Result<Option<T>, ConfigError> {
        if self.table.get(key).and_then(Value::as_str) == Some(NONE) {
            return Ok(None);
        }
        let allowed = format!("{}, or \"{NONE}\"", kind.allowed);
        self.optional(key, kind).map_err(|_| self.rejected(key, &allowed))
    }

    /// The value of a key that has no default.
    ///
    /// # Errors
    /// As [`Reader::optional`], and [`ConfigError::Missing`].
    pub(super) fn required<T>(&self, key: &'static str, kind: Kind<T>) -> Result<T, ConfigError> {
        let allowed = kind.allowed.to_owned();
        let missing =
            || ConfigError::Missing { origin: self.origin.file.clone(), key: self.dotted(key), allowed };
        self.optional(key, kind)?.ok_or_else(missing)
    }

    /// The table under a key, empty if absent; its keys are checked when it is opened.
    ///
    /// # Errors
    /// [`ConfigError::Value`] if it is not a table.
    pub(super) fn table(&self, key: &'static str) -> Result<Table, ConfigError> {
        let table = Kind { allowed: "a table", read: |value: &Value| value.as_table().cloned() };
        self.or(key, table, Table::new())
    }

    /// A table whose other keys depend on its `name`; returns the name, or the default, and the table
    /// without it.
    ///
    /// # Errors
    /// [`ConfigError::Value`] if the value is not a table or the name is not in `names`.
    pub(super) fn named_table(
        &self,
        key: &'static str,
        names: Kind<&'static str>,
        default: &'static str,
    ) -> Result<(&'static str, Table), ConfigError> {
        let mut table = self.table(key)?;
        let Some(name) = table.remove("name") else { return Ok((default, table)) };
        match (names.read)(&name) {
            Some(name) => Ok((name, table)),
            None => Err(self.reject(&format!("{}.name", self.dotted(key)), &name, names.allowed)),
        }
    }

    /// The error for a written value that `allowed` does not describe.
    ///
    /// # Panics
    /// If the key is not written.
    pub(super) fn rejected(&self, key: &'static str, allowed: &str) -> ConfigError {
        let value = self.table.get(key).expect("only written values are rejected");
        self.reject(&self.dotted(key), value, allowed)
    }

    fn reject(&self, dotted: &str, value: &Value, allowed: &str) -> ConfigError {
        ConfigError::Value {
            origin: self.origin.of(dotted),
            key: dotted.to_owned(),
            value: value.to_string(),
            allowed: allowed.to_owned(),
        }
    }

    /// The error for a pattern under a key that is no regular expression.
    pub(super) fn bad_pattern(&self, key: &str, pattern: &str, fault: regex::Error) -> ConfigError {
        let (key, pattern) = (self.dotted(key), pattern.to_owned());
        ConfigError::Pattern { origin: self.origin.of(&key), key, pattern, fault: Box::new(fault) }
    }

    /// The error for two written keys of this table that exclude each other.
    pub(super) fn conflict(&self, first: &str, second: &str, remedy: &'static str) -> ConfigError {
        let (first, second) = (self.dotted(first), self.dotted(second));
        ConfigError::Conflict { origin: self.origin.of(&second), first, second, remedy }
    }
}

/// The known key most like the given one, if any is like it at all.
pub(super) fn nearest<'k>(key: &str, known: &[&'k str]) -> Option<&'k str> {
    known
        .iter()
        .map(|candidate| (strsim::jaro_winkler(key, candidate), *candidate))
        .filter(|(similarity, _)| *similarity >= SIMILARITY_MIN)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}
