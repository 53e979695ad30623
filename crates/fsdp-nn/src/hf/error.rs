//! Errors in a `config.json`.

/// A `config.json` that does not describe a supported model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file is not a JSON object.
    #[error("config.json is not a JSON object: {what}")]
    Json {
        /// The parser's message.
        what: String,
    },
    /// A required key is missing.
    #[error("config.json lacks `{key}`; take it from the file that the model was published with")]
    Missing {
        /// The key.
        key: String,
    },
    /// A value of the wrong type or outside its range.
    #[error("config.json: `{key}` = {value}, but it must be {expected}")]
    Value {
        /// The key.
        key: String,
        /// The rejected value, as JSON.
        value: String,
        /// The allowed values.
        expected: &'static str,
    },
    /// A size beyond what is supported.
    #[error("config.json: `{key}` = {value} is too large: at most {limit} is supported")]
    TooLarge {
        /// The key, or the product of two keys.
        key: String,
        /// The rejected value, as JSON.
        value: String,
        /// The largest supported value.
        limit: usize,
    },
    /// A `model_type` that belongs to no family.
    #[error(
        "config.json: `model_type` = {model_type} is not supported; the closest supported family is \"{nearest}\", all: {supported}"
    )]
    Family {
        /// The rejected value, as JSON.
        model_type: String,
        /// The family with the most similar name.
        nearest: &'static str,
        /// The names of all families, as a list in a sentence.
        supported: String,
    },
    /// A `model_type` of a known family whose operations are not here.
    #[error("config.json: `model_type` = {model_type} is not supported: {why}")]
    Operations {
        /// The rejected value, as JSON.
        model_type: String,
        /// What the family has.
        why: &'static str,
    },
    /// A value that would change the model's mathematics in an unsupported way.
    #[error("config.json: `{key}` = {value} is not supported, only {supported}")]
    Unsupported {
        /// The key.
        key: String,
        /// The rejected value, as JSON.
        value: String,
        /// The supported values.
        supported: String,
    },
    /// Two sizes that do not fit each other.
    #[error(
        "config.json: `{key}` = {value} is not divisible by `{divisor_key}` = {divisor}; change one of them"
    )]
    Indivisible {
        /// Key of the dividend.
        key: String,
        /// The dividend.
        value: usize,
        /// Key of the divisor.
        divisor_key: String,
        /// The divisor.
        divisor: usize,
    },
}
