//! Errors of checkpoints: one variant per kind of failure that a caller can distinguish and act on.
//!
//! Every message is complete: it names the file, the tensor, the expected and the actual content, and the remedy.
//! Causes are part of the message rather than chained through `source()`, so a report prints them once. Parsers that
//! see bytes but know no path return a [`Fault`], which the code that knows the file turns into an [`Error`].

mod fault;
mod file_action;

use std::{io, ops::Range, path::PathBuf};

use fsdp_core::FailureKind;

pub use fault::Fault;
pub use file_action::FileAction;

use file_action::advice;

/// A checkpoint file that cannot be read or written, or a request for one that cannot be fulfilled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system or an object store refused a file operation.
    #[error("failed to {action} {}: {cause}{}", path.display(), advice(cause))]
    Io {
        /// The operation that failed.
        action: FileAction,
        /// The file or directory.
        path: PathBuf,
        /// The error of the operating system or object store.
        cause: io::Error,
    },
    /// A pipe, device or socket where a regular file is expected.
    #[error("{} is {what}, not a regular file; only those are read, so copy its content into one", path.display())]
    NotRegular {
        /// The path.
        path: PathBuf,
        /// Its file type, in words.
        what: &'static str,
    },
    /// A file or a set of files that is damaged or incomplete, or breaks a rule of its format.
    #[error("{}: {}", path.display(), fault::placed(reason, *offset))]
    Malformed {
        /// The file, or the directory of the files.
        path: PathBuf,
        /// Byte offset of the problem, in the file or in the decoded content of a compressed item. `None` if unknown.
        offset: Option<u64>,
        /// The problem and its remedy.
        reason: String,
    },
    /// Some elements of a tensor are missing or stored twice.
    #[error("{reason}")]
    NotWhole {
        /// Name of the tensor.
        tensor: String,
        /// The first run of such elements, in C order.
        elements: Range<u64>,
        /// Whether they are missing or stored twice, and in which files.
        reason: String,
    },
    /// Content that may be valid, but of a kind or version that cannot be read or written.
    #[error("{}: {reason}", path.display())]
    Unsupported {
        /// The file or directory.
        path: PathBuf,
        /// The unsupported feature and the remedy.
        reason: String,
    },
    /// A path that cannot be used as requested: it names no checkpoint, several, or a part of one, or a destination
    /// that already exists.
    #[error("{}: {reason}", path.display())]
    WrongPath {
        /// The path.
        path: PathBuf,
        /// What the path is, and what to name instead.
        reason: String,
    },
    /// The tensors of a model differ from the expected ones.
    #[error("the tensors in {} do not match the requested model: {differences}", path.display())]
    NamesDiffer {
        /// Path of the model.
        path: PathBuf,
        /// All differences.
        differences: String,
    },
    /// A request that the content of a file or the format of an output cannot fulfill.
    #[error("{}: {reason}", path.display())]
    BadRequest {
        /// The source or the output.
        path: PathBuf,
        /// The request, why it cannot be fulfilled, and the remedy.
        reason: String,
    },
    /// The writers of one output did not write each planned part exactly once.
    #[error("{}: {reason}", path.display())]
    Unplanned {
        /// The output.
        path: PathBuf,
        /// What was written and what was planned.
        reason: String,
    },
    /// Another process holds the resource or has not yet done its part, or the disk is full; a retry may succeed.
    #[error("{}: {reason}", path.display())]
    Unavailable {
        /// The path that is locked, missing or full.
        path: PathBuf,
        /// The obstacle and the remedy.
        reason: String,
    },
    /// The caller canceled the operation.
    #[error("interrupted; nothing was left behind")]
    Canceled,
    /// Several problems of one checkpoint.
    #[error("{}", joined(problems))]
    Several {
        /// The problems.
        problems: Vec<Error>,
    },
}

impl Error {
    /// Classifies the failure. Damage and invalid requests are `Input`; errors of the operating system may be
    /// temporary.
    ///
    /// The `match` has no wildcard, so that a new variant does not compile until it is classified.
    pub fn kind(&self) -> FailureKind {
        match self {
            Error::Io { cause, .. } => FailureKind::of_io(cause),
            Error::Several { problems } => {
                problems.iter().map(Error::kind).max().unwrap_or(FailureKind::Input)
            }
            Error::Unavailable { .. } => FailureKind::Temporary,
            Error::Unplanned { .. } => FailureKind::Permanent,
            Error::Canceled => FailureKind::Interrupted,
            Error::NotRegular { .. }
            | Error::Malformed { .. }
            | Error::NotWhole { .. }
            | Error::Unsupported { .. }
            | Error::WrongPath { .. }
            | Error::NamesDiffer { .. }
            | Error::BadRequest { .. } => FailureKind::Input,
        }
    }

    /// Returns the problems that this error consists of, usually only itself.
    pub fn into_problems(self) -> Vec<Error> {
        match self {
            Error::Several { problems } => problems,
            error => vec![error],
        }
    }

    /// Returns `Ok` for no problems, the only problem itself, or all of them as one error.
    pub(crate) fn all_of(mut problems: Vec<Error>) -> Result<(), Error> {
        match problems.pop() {
            None => Ok(()),
            Some(error) if problems.is_empty() => Err(error),
            Some(last) => {
                problems.push(last);
                Err(Error::Several { problems })
            }
        }
    }

    /// Whether the error reports a missing file.
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, Error::Io { cause, .. } if cause.kind() == io::ErrorKind::NotFound)
    }

    /// Whether a file could not be read for a reason that says nothing about it: a store did not answer, or the file was
    /// replaced meanwhile.
    pub(crate) fn is_unanswered(&self) -> bool {
        use io::ErrorKind::{StaleNetworkFileHandle, TimedOut};
        matches!(self, Error::Io { cause, .. } if matches!(cause.kind(), TimedOut | StaleNetworkFileHandle))
    }

    pub(crate) fn malformed(path: impl Into<PathBuf>, reason: impl Into<String>) -> Error {
        Error::Malformed { path: path.into(), offset: None, reason: reason.into() }
    }

    pub(crate) fn unsupported(path: impl Into<PathBuf>, reason: impl Into<String>) -> Error {
        Error::Unsupported { path: path.into(), reason: reason.into() }
    }

    pub(crate) fn wrong_path(path: impl Into<PathBuf>, reason: impl Into<String>) -> Error {
        Error::WrongPath { path: path.into(), reason: reason.into() }
    }

    pub(crate) fn bad_request(path: impl Into<PathBuf>, reason: impl Into<String>) -> Error {
        Error::BadRequest { path: path.into(), reason: reason.into() }
    }

    pub(crate) fn unplanned(path: impl Into<PathBuf>, reason: impl Into<String>) -> Error {
        Error::Unplanned { path: path.into(), reason: reason.into() }
    }

    pub(crate) fn unavailable(path: impl Into<PathBuf>, reason: impl Into<String>) -> Error {
        Error::Unavailable { path: path.into(), reason: reason.into() }
    }

    pub(crate) fn unknown_tensor(path: impl Into<PathBuf>, tensor: &str, tensor_count: usize) -> Error {
        let reason = format!("it has no tensor `{tensor}` among its {tensor_count}; `names()` lists them");
        Error::bad_request(path, reason)
    }
}

/// Maximum number of problems in a message.
const LISTED_MAX: usize = 4;

fn joined(problems: &[Error]) -> String {
    let shown: Vec<String> = problems.iter().take(LISTED_MAX).map(Error::to_string).collect();
    match problems.len() - shown.len() {
        0 => shown.join("; "),
        more => format!("{}; and {more} more problems (verify lists all)", shown.join("; ")),
    }
}

/// Quotes a word of a command for a shell, if it needs quotes.
pub(crate) fn shell_word(word: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "_-./:=+,@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Formats the first items of a list and the number of the others, for messages.
pub(crate) fn listed<T: ToString>(items: &[T], max: usize) -> String {
    let shown: Vec<String> = items.iter().take(max).map(T::to_string).collect();
    match items.len() - shown.len() {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests;
