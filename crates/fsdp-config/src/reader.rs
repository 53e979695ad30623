//! Reads one table of a run file key by key, each with its kind. Errors name the dotted key, the value, the accepted
//! values, and whether a file or `--set` wrote it.

use std::collections::BTreeSet;

use fsdp_core::schedule::Reshard;
use fsdp_core::wrap::WrapPolicy;
use regex::Regex;
use toml::{Table, Value};

use super::error::ConfigError;
use super::kind::{FAMILY, Kind, NONE, POSITIVE_LENGTH, TEXTS};
use super::named::{Named, one_of};

const PATTERNS: &str =
    "a list of regular expressions over parameter names, such as [\"bias\", \"norm\\\\.weight$\"]";
const PATTERNS_OR_FAMILY: &str =
    "\"family\", or a list of regular expressions over parameter names, such as [\"norm\\\\.weight$\"]";

/// Minimum similarity (0 to 1) of a suggestion; below it, a suggestion would be a guess.
const SIMILARITY_MIN: f64 = 0.7;

/// Whether a file has a dotted key. A list counts as a whole: indices are ignored.
fn has_key(table: &Table, key: &str) -> bool {
    let key = key.split('[').next().unwrap_or_default();
    let (first, rest) = key.split_once('.').map_or((key, None), |(first, rest)| (first, Some(rest)));
    match (table.get(first), rest) {
        (Some(Value::Table(inner)), Some(rest)) => has_key(inner, rest),
        (Some(_), None) => true,
        _ => false,
    }
}

/// The sources of a configuration, to be named in errors.
#[derive(Clone, Debug)]
pub(super) struct Origin {
    /// The run file and the files that it extends, with their contents.
    files: Vec<(String, Table)>,
    overridden: BTreeSet<String>,
}

impl Origin {
    /// Creates an origin from files, before overrides.
    pub(super) fn new(files: Vec<(String, Table)>) -> Origin {
        Origin { files, overridden: BTreeSet::new() }
    }

    /// Name of the run file.
    pub(super) fn file(&self) -> &str {
        &self.files[0].0
    }

    /// Records that `--set` wrote the key.
    pub(super) fn note_override(&mut self, key: &str) {
        self.overridden.insert(key.to_owned());
    }

    /// Returns the file that wrote the key, or `--set` if it wrote the key or a table around it. A key that was not
    /// written is attributed to the run file.
    pub(super) fn of(&self, key: &str) -> String {
        let covers_key = |overridden: &String| {
            key.strip_prefix(overridden.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        };
        match self.overridden.iter().find(|overridden| covers_key(overridden)) {
            Some(overridden) => format!("--set {overridden}"),
            None => {
                let wrote = |(_, table): &&(String, Table)| has_key(table, key);
                self.files.iter().find(wrote).map_or_else(|| self.file().to_owned(), |(file, _)| file.clone())
            }
        }
    }
}

/// Reads one table of a run file.
pub(super) struct Reader<'a> {
    origin: &'a Origin,
    /// Dotted name of the table, empty for the whole file.
    path: String,
    table: Table,
}

impl<'a> Reader<'a> {
    /// Creates a reader of the whole file.
    pub(super) fn new(origin: &'a Origin, table: Table) -> Reader<'a> {
        Reader { origin, path: String::new(), table }
    }

    /// Checks that the table has no keys other than `known`.
    ///
    /// # Errors
    /// [`ConfigError::UnknownKey`] for the first unknown key.
    pub(super) fn expect_known(&self, known: &[&str]) -> Result<(), ConfigError> {
        let Some(key) = self.table.keys().find(|key| !known.contains(&key.as_str())) else { return Ok(()) };
        Err(unknown_key(self.origin.of(&self.dotted(key)), key, known, |key| self.dotted(key)))
    }

    /// Returns the dotted name of a key of this table.
    pub(super) fn dotted(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// Returns the value of a key; `None` if it is absent.
    ///
    /// # Errors
    /// [`ConfigError::Value`] if it is not of the kind.
    pub(super) fn optional<T>(&self, key: &'static str, kind: Kind<T>) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.table.get(key) else { return Ok(None) };
        match (kind.read)(value) {
            Some(parsed) => Ok(Some(parsed)),
            None => Err(self.rejected(key, kind.allowed)),
        }
    }

    /// Returns the value of a key, or its default.
    ///
    /// # Errors
    /// As [`Reader::optional`].
    pub(super) fn or<T>(&self, key: &'static str, kind: Kind<T>, default: T) -> Result<T, ConfigError> {
        Ok(self.optional(key, kind)?.unwrap_or(default))
    }

    /// Returns the value of a key; `None` if it is absent or `"none"`.
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

    /// Returns the value of a key, or its default; `None` if it is `"none"`.
    ///
    /// # Errors
    /// As [`Reader::optional`].
    pub(super) fn unless_none<T>(
        &self,
        key: &'static str,
        kind: Kind<T>,
        default: T,
    ) -> Result<Option<T>, ConfigError> {
        if self.table.contains_key(key) { self.or_none(key, kind) } else { Ok(Some(default)) }
    }

    /// Returns the value of a key that has no default.
    ///
    /// # Errors
    /// As [`Reader::optional`], and [`ConfigError::Missing`].
    pub(super) fn required<T>(&self, key: &'static str, kind: Kind<T>) -> Result<T, ConfigError> {
        let allowed = kind.allowed.to_owned();
        let missing =
            || ConfigError::Missing { origin: self.origin.file().to_owned(), key: self.dotted(key), allowed };
        self.optional(key, kind)?.ok_or_else(missing)
    }

    /// Returns the value that a key names, or its default.
    ///
    /// # Errors
    /// [`ConfigError::Value`] if it is not one of the names.
    pub(super) fn named<T: Named>(&self, key: &'static str, default: T) -> Result<T, ConfigError> {
        let Some(value) = self.table.get(key) else { return Ok(default) };
        T::of(value).ok_or_else(|| self.rejected(key, &one_of(T::NAMES.iter().map(|(name, _)| *name))))
    }

    /// Returns the value that a key names; `None` if it is absent or `"none"`.
    ///
    /// # Errors
    /// [`ConfigError::Value`] if it is not one of the names.
    pub(super) fn named_or_none<T: Named>(&self, key: &'static str) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.table.get(key).filter(|value| value.as_str() != Some(NONE)) else {
            return Ok(None);
        };
        let names = T::NAMES.iter().map(|(name, _)| *name).chain([NONE]);
        T::of(value).map(Some).ok_or_else(|| self.rejected(key, &one_of(names)))
    }

    /// Returns the values that a list names, each at most once; empty if it is absent.
    ///
    /// # Errors
    /// [`ConfigError::Value`] if it is not a list of such names.
    pub(super) fn names<T: Named>(&self, key: &'static str) -> Result<Vec<T>, ConfigError> {
        let Some(value) = self.table.get(key) else { return Ok(Vec::new()) };
        let values: Option<Vec<T>> = value.as_array().and_then(|names| names.iter().map(T::of).collect());
        let is_unique = |values: &Vec<T>| (1..values.len()).all(|at| !values[..at].contains(&values[at]));
        values.filter(is_unique).ok_or_else(|| {
            let names = one_of(T::NAMES.iter().map(|(name, _)| *name));
            self.rejected(key, &format!("a list of {names}, each at most once"))
        })
    }

    /// Applies `read` to the table under a key, or to an empty table if it is absent.
    ///
    /// # Errors
    /// [`ConfigError::Value`] if it is not a table, and the errors of `read`.
    pub(super) fn table<T>(
        &self,
        key: &'static str,
        read: impl FnOnce(&Reader<'a>) -> Result<T, ConfigError>,
    ) -> Result<T, ConfigError> {
        let kind = Kind { allowed: "a table", read: |value: &Value| value.as_table().cloned() };
        let table = self.or(key, kind, Table::new())?;
        read(&Reader { origin: self.origin, path: self.dotted(key), table })
    }

    /// Applies `read` to each table of the list under a key, numbered from 0 in errors; empty if it is absent.
    ///
    /// # Errors
    /// [`ConfigError::Value`] if it is not a list of tables, and the errors of `read`.
    pub(super) fn tables<T>(
        &self,
        key: &'static str,
        allowed: &'static str,
        read: impl Fn(&Reader<'a>) -> Result<T, ConfigError>,
    ) -> Result<Vec<T>, ConfigError> {
        let list = |value: &Value| value.as_array()?.iter().map(|item| item.as_table().cloned()).collect();
        let tables: Vec<Table> = self.or(key, Kind { allowed, read: list }, Vec::new())?;
        let numbered = tables.into_iter().enumerate();
        let reader =
            |(at, table)| Reader { origin: self.origin, path: format!("{}[{at}]", self.dotted(key)), table };
        numbered.map(|item| read(&reader(item))).collect()
    }

    /// Applies `read` to the table under a key; `None` if it is absent.
    ///
    /// # Errors
    /// As [`Reader::table`].
    pub(super) fn table_or_none<T>(
        &self,
        key: &'static str,
        read: impl FnOnce(&Reader<'a>) -> Result<T, ConfigError>,
    ) -> Result<Option<T>, ConfigError> {
        if self.table.contains_key(key) { self.table(key, read).map(Some) } else { Ok(None) }
    }

    /// Returns the list under `key`, which is required if the list under `other` is absent or empty, and excluded if
    /// not.
    ///
    /// # Errors
    /// As [`Reader::required`], and [`ConfigError::Conflict`] if both are written.
    pub(super) fn required_unless<T>(
        &self,
        key: &'static str,
        other: &'static str,
        kind: Kind<Vec<T>>,
    ) -> Result<Vec<T>, ConfigError> {
        let is_empty = |key: &str| self.table.get(key).and_then(Value::as_array).is_none_or(Vec::is_empty);
        match (is_empty(key), is_empty(other)) {
            (_, true) => self.required(key, kind),
            (true, false) => Ok(Vec::new()),
            (false, false) => Err(self.conflict(key, other, "remove one of the two")),
        }
    }

    /// For a table whose other keys depend on its `name`: returns the name, by default the first of `names`, and the
    /// table without it.
    ///
    /// # Errors
    /// [`ConfigError::Value`] if it is not one of `names`.
    pub(super) fn split_name(
        &self,
        names: &[&'static str],
    ) -> Result<(&'static str, Reader<'a>), ConfigError> {
        let mut table = self.table.clone();
        let name = match table.remove("name") {
            None => Some(names[0]),
            Some(written) => names.iter().find(|&&name| written.as_str() == Some(name)).copied(),
        };
        let name = name.ok_or_else(|| self.rejected("name", &one_of(names.iter().copied())))?;
        Ok((name, Reader { origin: self.origin, path: self.path.clone(), table }))
    }

    /// Returns a list of regular expressions over parameter names.
    ///
    /// # Errors
    /// [`ConfigError::Value`] if it is not a list of strings, [`ConfigError::Pattern`] for the first that is not a
    /// regular expression.
    pub(super) fn patterns(&self, key: &'static str) -> Result<Vec<String>, ConfigError> {
        self.patterns_with(key, PATTERNS)
    }

    fn patterns_with(&self, key: &'static str, allowed: &'static str) -> Result<Vec<String>, ConfigError> {
        let patterns = self.or(key, Kind { allowed, ..TEXTS }, Vec::new())?;
        let invalid = patterns.iter().find_map(|pattern| Some((pattern, Regex::new(pattern).err()?)));
        let Some((pattern, fault)) = invalid else { return Ok(patterns) };
        let (key, pattern, fault) = (self.dotted(key), pattern.clone(), Box::new(fault));
        Err(ConfigError::Pattern { origin: self.origin.of(&key), key, pattern, fault })
    }

    /// As [`Reader::patterns`]; `None` if the family of the model decides, which is the default.
    ///
    /// # Errors
    /// As [`Reader::patterns`].
    pub(super) fn patterns_or_family(&self, key: &'static str) -> Result<Option<Vec<String>>, ConfigError> {
        match self.table.get(key) {
            None => Ok(None),
            Some(value) if value.as_str() == Some(FAMILY) => Ok(None),
            Some(_) => self.patterns_with(key, PATTERNS_OR_FAMILY).map(Some),
        }
    }

    /// Returns which modules become units: by class under `key`, or by size under `min_num_params`.
    ///
    /// # Errors
    /// As [`Reader::optional`], and [`ConfigError::Conflict`] if both are written.
    pub(super) fn wrap(&self, key: &'static str) -> Result<WrapPolicy, ConfigError> {
        match (self.optional(key, TEXTS)?, self.optional("min_num_params", POSITIVE_LENGTH)?) {
            (Some(_), Some(_)) => Err(self.conflict(
                key,
                "min_num_params",
                "choose units by class or by size, and remove the other",
            )),
            (None, Some(count)) => Ok(WrapPolicy::MinParams(count)),
            (classes, None) => Ok(WrapPolicy::Classes(classes.unwrap_or_default())),
        }
    }

    /// Returns what happens to gathered parameters between forward and backward.
    ///
    /// # Errors
    /// As [`Reader::optional`].
    pub(super) fn reshard(&self, key: &'static str) -> Result<Reshard, ConfigError> {
        let read = |value: &Value| match value {
            Value::Boolean(true) => Some(Reshard::Always),
            Value::Boolean(false) => Some(Reshard::Never),
            Value::String(text) if text == "auto" => Some(Reshard::Auto),
            value => (POSITIVE_LENGTH.read)(value).map(Reshard::ToGroup),
        };
        let allowed = "true, false, \"auto\" or the size of the groups, an integer of at least 1";
        self.or(key, Kind { allowed, read }, Reshard::Auto)
    }

    /// Returns the error for a written value that is not one of `allowed`.
    ///
    /// # Panics
    /// If the key is not written.
    pub(super) fn rejected(&self, key: &'static str, allowed: &str) -> ConfigError {
        let value = self.table.get(key).expect("only written values are rejected");
        let key = self.dotted(key);
        let (value, allowed) = (value.to_string(), allowed.to_owned());
        ConfigError::Value { origin: self.origin.of(&key), key, value, allowed }
    }

    /// Returns the error for two written keys of this table that exclude each other.
    pub(super) fn conflict(&self, first: &str, second: &str, remedy: &'static str) -> ConfigError {
        let (first, second) = (self.dotted(first), self.dotted(second));
        ConfigError::Conflict { origin: self.origin.of(&second), first, second, remedy }
    }
}

/// Returns the error for a key that a table does not have; `dotted` returns the dotted name of a key.
pub(super) fn unknown_key(
    origin: String,
    key: &str,
    known: &[&str],
    dotted: impl Fn(&str) -> String,
) -> ConfigError {
    ConfigError::UnknownKey {
        origin,
        key: dotted(key),
        nearest: nearest(key, known).map(&dotted),
        known: known.iter().map(|&known| known.to_owned()).collect(),
    }
}

/// Returns the known name most similar to `key`; `None` if none is similar enough.
pub fn nearest<'k>(key: &str, known: &[&'k str]) -> Option<&'k str> {
    known
        .iter()
        .map(|candidate| (strsim::jaro_winkler(key, candidate), *candidate))
        .filter(|(similarity, _)| *similarity >= SIMILARITY_MIN)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}
