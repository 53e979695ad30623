//! What is wrong with bytes, as a parser says it that knows no path.

use std::{borrow::Cow, path::PathBuf};

use super::Error;

/// Something that a parser refuses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The bytes are damaged or break a rule of their format.
    #[error("{}", placed(reason, *offset))]
    Malformed {
        /// The byte where it was noticed, where one is known, counted from the first one that the parser was given.
        offset: Option<u64>,
        /// What is wrong.
        reason: String,
    },
    /// The bytes may be sound, but mean something that is not read or written here.
    #[error("{reason}")]
    Unsupported {
        /// What is not supported, and the way out.
        reason: String,
    },
    /// A pickle names a class or function that is not in the table of what checkpoints hold.
    #[error(
        "it names `{module}.{name}` at byte {offset}, which is no part of a known checkpoint format; nothing of it \
         was run, and it is not read"
    )]
    UnknownGlobal {
        /// The byte of the pickle.
        offset: u64,
        /// The module.
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

    /// Something in the content is not what the format needs.
    pub(crate) fn unexpected(place: impl AsRef<str>, expected: &str) -> Fault {
        Fault::new(format!("{} should be {expected}", place.as_ref()))
    }

    /// The fault of what the parsed bytes are a part of: `whole` says which part, and they begin at `start` there.
    pub(crate) fn of_part(self, whole: &str, start: u64) -> Fault {
        match self {
            Fault::Malformed { offset, reason } => {
                let offset = offset.and_then(|offset| offset.checked_add(start));
                Fault::Malformed { offset, reason: format!("{whole}{reason}") }
            }
            other => Fault::Unsupported { reason: format!("{whole}{other}") },
        }
    }

    /// The error that names the file.
    pub(crate) fn in_file(self, path: impl Into<PathBuf>) -> Error {
        match self {
            Fault::Malformed { offset, reason } => Error::Malformed { path: path.into(), offset, reason },
            other => Error::unsupported(path, other.to_string()),
        }
    }
}

/// A reason with the byte where it was noticed.
pub(super) fn placed(reason: &str, offset: Option<u64>) -> Cow<'_, str> {
    match offset {
        None => reason.into(),
        Some(offset) => format!("{reason} (at byte {offset})").into(),
    }
}
