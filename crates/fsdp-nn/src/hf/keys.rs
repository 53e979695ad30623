//! Typed access to the keys of a `config.json`.

use serde_json::{Map, Value};

use super::error::ConfigError;

/// The keys of a JSON object; `null` is the same as absent.
///
/// A key may be written as a path, which is what errors show: its last part is looked up.
#[derive(Clone, Copy, Debug)]
pub(super) struct Keys<'a>(pub(super) &'a Map<String, Value>);

impl<'a> Keys<'a> {
    /// The value of a key, or `None` when it is absent or `null`.
    pub(super) fn get(self, key: &str) -> Option<&'a Value> {
        let name = key.rsplit_once('.').map_or(key, |(_, name)| name);
        self.0.get(name).filter(|value| !value.is_null())
    }

    /// The value of the first of several spellings that is there.
    fn any(self, spellings: &[&'static str]) -> Option<(&'static str, &'a Value)> {
        spellings.iter().find_map(|&key| Some((key, self.get(key)?)))
    }

    /// A size from 1 to `limit` under one of several spellings.
    pub(super) fn size(self, spellings: &[&'static str], limit: usize) -> Result<Option<usize>, ConfigError> {
        let Some((key, value)) = self.any(spellings) else { return Ok(None) };
        match value.as_u64() {
            Some(size) if size > limit as u64 => {
                Err(ConfigError::TooLarge { key, value: value.to_string(), limit })
            }
            Some(size) if size > 0 => Ok(Some(size as usize)),
            _ => Err(ConfigError::Value { key, value: value.to_string(), expected: "a positive integer" }),
        }
    }

    /// As [`Keys::size`], but it must be there.
    pub(super) fn required_size(
        self,
        spellings: &[&'static str],
        limit: usize,
    ) -> Result<usize, ConfigError> {
        self.size(spellings, limit)?.ok_or(ConfigError::Missing { key: spellings[0] })
    }

    /// A number that `accepts` accepts.
    pub(super) fn number(
        self,
        key: &'static str,
        default: f64,
        expected: &'static str,
        accepts: impl Fn(f64) -> bool,
    ) -> Result<f64, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        match value.as_f64() {
            Some(number) if accepts(number) => Ok(number),
            _ => Err(ConfigError::Value { key, value: value.to_string(), expected }),
        }
    }

    /// A positive number.
    pub(super) fn positive(self, key: &'static str, default: f64) -> Result<f64, ConfigError> {
        self.number(key, default, "a positive number", |number| number > 0.0)
    }

    /// A probability of dropping something.
    pub(super) fn probability(self, key: &'static str, default: f64) -> Result<f64, ConfigError> {
        self.number(key, default, "at least 0 and below 1", |p| (0.0..1.0).contains(&p))
    }

    /// The deviation of initial weights.
    pub(super) fn initializer_range(self) -> Result<f64, ConfigError> {
        self.number("initializer_range", 0.02, "a number that is not negative", |std| std >= 0.0)
    }

    /// A truth value.
    pub(super) fn flag(self, key: &'static str, default: bool) -> Result<bool, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let wrong = || ConfigError::Value { key, value: value.to_string(), expected: "true or false" };
        value.as_bool().ok_or_else(wrong)
    }

    /// Rejects a key whose value is there and none of `accepts`.
    pub(super) fn only(
        self,
        key: &'static str,
        supported: &'static str,
        accepts: impl Fn(&Value) -> bool,
    ) -> Result<(), ConfigError> {
        match self.get(key) {
            Some(value) if !accepts(value) => {
                Err(ConfigError::Unsupported { key, value: value.to_string(), supported })
            }
            _ => Ok(()),
        }
    }

    /// Rejects a key unless its value is absent, `null` or `false`.
    pub(super) fn only_false(self, key: &'static str) -> Result<(), ConfigError> {
        self.only(key, "false", |value| value == &Value::Bool(false))
    }

    /// Rejects a key unless it is absent or `null`.
    pub(super) fn only_null(self, key: &'static str) -> Result<(), ConfigError> {
        self.only(key, "null", |_| false)
    }

    /// The object under a key.
    pub(super) fn object(self, key: &'static str) -> Result<Option<Keys<'a>>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let wrong = || ConfigError::Value { key, value: value.to_string(), expected: "an object" };
        value.as_object().map(|map| Some(Keys(map))).ok_or_else(wrong)
    }
}

/// Checks that one size divides another.
pub(super) fn divides(
    (key, value): (&'static str, usize),
    (divisor_key, divisor): (&'static str, usize),
) -> Result<(), ConfigError> {
    if value.is_multiple_of(divisor) {
        return Ok(());
    }
    Err(ConfigError::Indivisible { key, value, divisor_key, divisor })
}
