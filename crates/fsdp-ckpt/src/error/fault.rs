//! Errors in bytes, as reported by parsers that know no path.

use std::{borrow::Cow, path::PathBuf};

use super::Error;

/// The reason why a parser refuses its input.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The bytes are damaged or break a rule of their format.
    #[error("{}", placed(reason, *offset))]
    Malformed {
        /// Byte offset of the problem, counted from the start of the parser's input. `None` if unknown.
        offset: Option<u64>,
        /// The problem.
        reason: String,
    },
    /// The bytes may be valid, but represent something that cannot be read or written.
    #[error("{reason}")]
    Unsupported {
        /// The unsupported feature and the remedy.
        reason: String,
    },
    /// A pickle names a class or function that is not in the table of known checkpoint types.
    #[error(
        "it names `{module}.{name}` at byte {offset}, which belongs to no known checkpoint format; it was \
         neither run nor read"
    )]
    UnknownGlobal {
        /// Byte offset in the pickle.
        offset: u64,
        /// The module, as named in the pickle.
        module: String,
        /// The name in the module.
        name: String,
    },
}

impl Fault {
    pub(crate) fn new(reason: impl Into<String>) -> Fault {
        Fault::Malformed { offset: None, reason: reason.into() }
    }

    pub(crate) fn at(offset: usize, reason: impl Into<String>) -> Fault {
        Fault::Malformed { offset: Some(offset as u64), reason: reason.into() }
    }

    pub(crate) fn unsupported(reason: impl Into<String>) -> Fault {
        Fault::Unsupported { reason: reason.into() }
    }

    /// The error for content that is not as the format requires.
    pub(crate) fn unexpected(place: impl AsRef<str>, expected: &str) -> Fault {
        Fault::new(format!("{} should be {expected}", place.as_ref()))
    }

    /// Converts the fault of a part to one of the whole: `whole` describes the part, and `start` is its offset.
    pub(crate) fn of_part(self, whole: &str, start: u64) -> Fault {
        match self {
            Fault::Malformed { offset, reason } => {
                let offset = offset.and_then(|offset| offset.checked_add(start));
                Fault::Malformed { offset, reason: format!("{whole}{reason}") }
            }
            other => Fault::Unsupported { reason: format!("{whole}{other}") },
        }
    }

    /// Converts the fault to an error that names the file.
    pub(crate) fn in_file(self, path: impl Into<PathBuf>) -> Error {
        match self {
            Fault::Malformed { offset, reason } => Error::Malformed { path: path.into(), offset, reason },
            other => Error::unsupported(path, other.to_string()),
        }
    }
}

/// Appends the byte offset of the problem to a reason.
pub(super) fn placed(reason: &str, offset: Option<u64>) -> Cow<'_, str> {
    match offset {
        None => reason.into(),
        Some(offset) => format!("{reason} (at byte {offset})").into(),
    }
}
