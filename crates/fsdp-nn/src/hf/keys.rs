//! Typed access to the keys of a `config.json`.

use std::cell::RefCell;
use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::error::ConfigError;

/// The keys of a JSON object; `null` is treated as absent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Keys<'a> {
    object: Option<&'a Map<String, Value>>,
    /// The key of the object within the file; `None` for the whole file.
    inside: Option<&'static str>,
    /// Records the keys that are read, if needed.
    read_keys: Option<&'a ReadKeys>,
}

/// The keys of a file that were read, each with the accepted values if others are refused.
pub(super) type ReadKeys = RefCell<BTreeMap<String, Option<String>>>;

impl<'a> Keys<'a> {
    /// The keys of a file.
    pub(super) fn new(object: &'a Map<String, Value>, read_keys: Option<&'a ReadKeys>) -> Self {
        Self { object: Some(object), inside: None, read_keys }
    }

    /// Returns the value of a key, or `None` if it is absent or `null`.
    pub(super) fn get(self, key: &str) -> Option<&'a Value> {
        if let Some(read_keys) = self.read_keys {
            read_keys.borrow_mut().entry(self.path(key)).or_default();
        }
        self.object?.get(key).filter(|value| !value.is_null())
    }

    /// Whether a key exists, even as `null`.
    pub(super) fn contains(self, key: &str) -> bool {
        self.object.is_some_and(|object| object.contains_key(key))
    }

    /// Returns the name of a key for error messages.
    pub(super) fn path(self, key: &str) -> String {
        self.inside.map_or(key.to_owned(), |outer| format!("{outer}.{key}"))
    }

    /// An error for a value of the wrong type or outside its range.
    pub(super) fn wrong(self, key: &str, expected: &'static str) -> ConfigError {
        let value = self.get(key).map_or("null".to_owned(), Value::to_string);
        ConfigError::Value { key: self.path(key), value, expected }
    }

    /// An error for a value that would change the model's mathematics in an unsupported way.
    pub(super) fn unsupported(self, key: &str, supported: &str) -> ConfigError {
        let value = self.get(key).map_or("null".to_owned(), Value::to_string);
        ConfigError::Unsupported { key: self.path(key), value, supported: supported.to_owned() }
    }

    /// Reads a size from 1 to `limit`, under the first present one of several spellings.
    pub(super) fn size(self, spellings: &[&str], limit: usize) -> Result<Option<usize>, ConfigError> {
        let found = spellings.iter().find_map(|&key| Some((key, self.get(key)?)));
        let Some((key, value)) = found else { return Ok(None) };
        match value.as_u64() {
            Some(size) if size > limit as u64 => {
                Err(ConfigError::TooLarge { key: self.path(key), value: value.to_string(), limit })
            }
            Some(size) if size > 0 => Ok(Some(size as usize)),
            _ => Err(self.wrong(key, "a positive integer")),
        }
    }

    /// Reads a number from 0 to `limit`.
    pub(super) fn count(self, key: &str, default: usize, limit: usize) -> Result<usize, ConfigError> {
        match self.get(key).map(Value::as_u64) {
            None => Ok(default),
            Some(Some(0)) => Ok(0),
            Some(_) => Ok(self.size(&[key], limit)?.unwrap_or(default)),
        }
    }

    /// As [`Keys::size`], for a required key.
    pub(super) fn required_size(self, spellings: &[&str], limit: usize) -> Result<usize, ConfigError> {
        self.size(spellings, limit)?.ok_or_else(|| ConfigError::Missing { key: self.path(spellings[0]) })
    }

    /// Reads a number for which `accepts` is true, if the key is present.
    pub(super) fn optional_number(
        self,
        key: &str,
        expected: &'static str,
        accepts: impl Fn(f64) -> bool,
    ) -> Result<Option<f64>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = value.as_f64().filter(|&number| accepts(number));
        number.map(Some).ok_or_else(|| self.wrong(key, expected))
    }

    /// As [`Keys::optional_number`], with a default.
    pub(super) fn number(
        self,
        key: &str,
        default: f64,
        expected: &'static str,
        accepts: impl Fn(f64) -> bool,
    ) -> Result<f64, ConfigError> {
        Ok(self.optional_number(key, expected, accepts)?.unwrap_or(default))
    }

    /// Reads a positive number.
    pub(super) fn positive(self, key: &str, default: f64) -> Result<f64, ConfigError> {
        self.number(key, default, "a positive number", |number| number > 0.0)
    }

    /// Reads a list of `count` positive numbers.
    pub(super) fn positive_numbers(self, key: &str, count: usize) -> Result<Vec<f64>, ConfigError> {
        let list = self.get(key).ok_or_else(|| ConfigError::Missing { key: self.path(key) })?;
        let list = list.as_array().filter(|list| list.len() == count);
        let numbers = list.and_then(|list| {
            list.iter().map(|number| number.as_f64().filter(|&number| number > 0.0)).collect()
        });
        numbers.ok_or_else(|| {
            self.wrong(key, "a list with one positive number for each rotated pair of elements")
        })
    }

    /// Reads a dropout rate.
    pub(super) fn probability(self, key: &str, default: f64) -> Result<f64, ConfigError> {
        self.number(key, default, "at least 0 and below 1", |p| (0.0..1.0).contains(&p))
    }

    /// Reads the standard deviation of initial weights.
    pub(super) fn initializer_range(self, absent: f64) -> Result<f64, ConfigError> {
        self.number("initializer_range", absent, "a non-negative number", |std| std >= 0.0)
    }

    /// Reads a boolean.
    pub(super) fn flag(self, key: &str, default: bool) -> Result<bool, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.wrong(key, "true or false"))
    }

    /// Reads a string.
    pub(super) fn text(self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong(key, "a string"))
    }

    /// Rejects a key that is present and for which `accepts` is false.
    pub(super) fn only(
        self,
        key: &str,
        supported: &str,
        accepts: impl Fn(&Value) -> bool,
    ) -> Result<(), ConfigError> {
        let value = self.get(key);
        if let Some(read_keys) = self.read_keys {
            read_keys.borrow_mut().insert(self.path(key), Some(supported.to_owned()));
        }
        match value {
            Some(value) if !accepts(value) => Err(self.unsupported(key, supported)),
            _ => Ok(()),
        }
    }

    /// Rejects a key unless its value is absent, `null` or `false`.
    pub(super) fn only_false(self, key: &str) -> Result<(), ConfigError> {
        self.only(key, "false", |value| value == &Value::Bool(false))
    }

    /// Rejects a key unless it is absent or `null`.
    pub(super) fn only_null(self, key: &str) -> Result<(), ConfigError> {
        self.only(key, "null", |_| false)
    }

    /// Rejects keys of an object other than `known`.
    pub(super) fn only_known(self, known: &[&str]) -> Result<(), ConfigError> {
        let mut keys = self.object.into_iter().flatten().filter(|(_, value)| !value.is_null());
        match keys.find(|(key, _)| !known.contains(&key.as_str())) {
            Some((key, _)) => Err(self.unsupported(key, "null")),
            None => Ok(()),
        }
    }

    /// Returns the object under a key; `None` if it is absent or empty.
    pub(super) fn object(self, key: &'static str) -> Result<Option<Keys<'a>>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let object = value.as_object().ok_or_else(|| self.wrong(key, "an object"))?;
        Ok((!object.is_empty()).then_some(Keys { object: Some(object), inside: Some(key), ..self }))
    }

    /// As [`Keys::object`], for a nested object; `path` names both keys.
    pub(super) fn inner_object(
        self,
        key: &'static str,
        path: &'static str,
    ) -> Result<Option<Keys<'a>>, ConfigError> {
        Ok(self.object(key)?.map(|object| Keys { inside: Some(path), ..object }))
    }

    /// Returns an empty object that stands for an absent one.
    pub(super) fn absent(self, key: &'static str) -> Keys<'a> {
        Keys { object: None, inside: Some(key), ..self }
    }
}

/// Checks that one size divides another.
pub(super) fn divides(
    (key, value): (&str, usize),
    (divisor_key, divisor): (&str, usize),
) -> Result<(), ConfigError> {
    if value.is_multiple_of(divisor) {
        return Ok(());
    }
    Err(ConfigError::Indivisible { key: key.to_owned(), value, divisor_key: divisor_key.to_owned(), divisor })
}
