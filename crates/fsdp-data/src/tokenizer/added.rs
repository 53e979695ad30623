//! Tokens that are matched in text before any other processing.

use serde_json::Value;

/// A token that is matched in text before any other processing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AddedToken {
    /// Text of the token.
    pub(super) content: String,
    /// Whether the token includes white space before it, and after it.
    pub(super) strips: [bool; 2],
    /// Whether it only matches as a separate word.
    pub(super) single_word: bool,
    /// Whether it is matched in the normalized text.
    pub(super) normalized: bool,
    /// Whether it is special: not text, but a mark.
    pub(super) special: bool,
}

impl AddedToken {
    /// Reads a token from its text, which makes it special, or from an object with its text.
    pub(super) fn of(value: &Value) -> Option<AddedToken> {
        let content = value.as_str().or_else(|| value["content"].as_str()).filter(|text| !text.is_empty())?;
        let flag = |name: &str| value[name].as_bool();
        let special = flag("special").unwrap_or(value.is_string());
        let given = |name: &str| flag(name).unwrap_or(false);
        Some(AddedToken {
            content: content.to_owned(),
            strips: [given("lstrip"), given("rstrip")],
            single_word: given("single_word"),
            normalized: flag("normalized").unwrap_or(!special),
            special,
        })
    }

    /// Returns a special token with the default rules.
    pub(super) fn special(content: &str) -> AddedToken {
        AddedToken {
            content: content.to_owned(),
            strips: [false; 2],
            single_word: false,
            normalized: false,
            special: true,
        }
    }
}
