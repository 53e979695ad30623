//! Pieces of run files.

/// Column of the comments after keys.
const COMMENT_COLUMN: usize = 40;

/// A line, with a comment unless it is empty.
pub(crate) fn commented(line: &str, comment: &str) -> String {
    if comment.is_empty() { line.to_owned() } else { format!("{line:<COMMENT_COLUMN$} # {comment}") }
}

/// A string.
pub(crate) fn string(text: &str) -> String {
    toml::Value::from(text).to_string()
}

/// A list of strings.
pub(crate) fn strings(texts: &[String]) -> String {
    toml::Value::from(texts.to_vec()).to_string()
}
