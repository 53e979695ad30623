//! What can go wrong with checkpoints: one variant per kind of trouble that a caller can tell apart and act on.
//!
//! Every message is complete: it names the file, the tensor, what was expected and found, and the way out. Causes
//! are part of the message and not chained behind `source()`, so a report prints them once. Parsers that see bytes
//! and know no path return a [`Fault`], of which whoever knows the file makes an [`Error`].

mod fault;
mod file_action;
mod names;

use std::{io, ops::Range, path::PathBuf};

use fsdp_core::FailureKind;

pub use fault::Fault;
pub use file_action::FileAction;
pub use names::{DtypeDifference, NameDifferences, ShapeDifference};

use file_action::advice;

/// A checkpoint file, or a request made of one, that cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system or an object store refused a file operation.
    #[error("failed to {action} {}: {cause}{}", path.display(), advice(cause))]
    Io {
        /// What was attempted.
        action: FileAction,
        /// The file or directory.
        path: PathBuf,
        /// What the operating system said.
        cause: io::Error,
    },
    /// A pipe, device or socket where a file is read.
    #[error("{} is {what}, not a regular file; nothing else is read, so copy its content into a file", path.display())]
    NotRegular {
        /// The path.
        path: PathBuf,
        /// What it is, in words.
        what: &'static str,
    },
    /// A file or a set of files that is damaged or incomplete, or breaks a rule of its format.
    #[error("{}: {}", path.display(), fault::placed(reason, *offset))]
    Malformed {
        /// The file, or the directory of the files.
        path: PathBuf,
        /// The byte where it was noticed, where one is known: of the file, or of what a compressed item decodes to.
        offset: Option<u64>,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// Elements of a tensor that are not there exactly once.
    #[error("{reason}")]
    NotWhole {
        /// The tensor.
        tensor: String,
        /// The first run of such elements, in C order.
        elements: Range<u64>,
        /// Whether they are missing or doubled, and in which files.
        reason: String,
    },
    /// Content that may be sound, of a kind or version that is not read or written here.
    #[error("{}: {reason}", path.display())]
    Unsupported {
        /// The file or directory.
        path: PathBuf,
        /// What is not supported, and the way out.
        reason: String,
    },
    /// A path that cannot be what it was named for: no checkpoint, several, or a part of one; a destination that is
    /// taken.
    #[error("{}: {reason}", path.display())]
    WrongPath {
        /// The path.
        path: PathBuf,
        /// What it is, and what to name instead.
        reason: String,
    },
    /// A tensor was asked for that the file, model or plan does not have.
    #[error(
        "{} has no tensor `{tensor}` (it has {tensor_count}); `names()` lists those it has", path.display()
    )]
    UnknownTensor {
        /// The file, model or planned file.
        path: PathBuf,
        /// The name that was asked for.
        tensor: String,
        /// How many tensors there are.
        tensor_count: usize,
    },
    /// The tensors of a model are not those that were expected.
    #[error("the tensors in {} are not those of the model that was asked for: {differences}", path.display())]
    NamesDiffer {
        /// The model.
        path: PathBuf,
        /// All differences.
        differences: Box<NameDifferences>,
    },
    /// A request that the content of a file, or the format of an output, cannot fulfil.
    #[error("{}: {reason}", path.display())]
    BadRequest {
        /// The source or the output.
        path: PathBuf,
        /// What was asked for and why it cannot be, with the way out.
        reason: String,
    },
    /// Writers of one output did not write what was planned, each part once.
    #[error("{}: {reason}", path.display())]
    Unplanned {
        /// The output.
        path: PathBuf,
        /// Who wrote what, and what was planned.
        reason: String,
    },
    /// Another process is in the way, or has not yet done its part; another try may succeed.
    #[error("{}: {reason}", path.display())]
    Unavailable {
        /// What is locked or not there.
        path: PathBuf,
        /// Who is in the way, and what to do.
        reason: String,
    },
    /// The disk has no room for a save.
    #[error(
        "{}: a save needs {needed} bytes, and the disk has {free} left; make room there, or choose another out_dir",
        path.display()
    )]
    NoSpace {
        /// The directory of all checkpoints.
        path: PathBuf,
        /// Bytes of a save.
        needed: u64,
        /// Bytes that are left.
        free: u64,
    },
    /// The caller asked to stop.
    #[error("interrupted; nothing was left behind")]
    Canceled,
    /// Several things are wrong with one checkpoint.
    #[error("{}", joined(problems))]
    Several {
        /// Each of them.
        problems: Vec<Error>,
    },
}

impl Error {
    /// What this failure calls for. Damage and wrong requests are input; what the operating system says may pass.
    ///
    /// The `match` has no wildcard: a new variant does not compile before it is classified.
    pub fn kind(&self) -> FailureKind {
        match self {
            Error::Io { cause, .. } => FailureKind::of_io(cause),
            Error::Several { problems } => {
                problems.iter().map(Error::kind).max().unwrap_or(FailureKind::Input)
            }
            Error::Unavailable { .. } | Error::NoSpace { .. } => FailureKind::Temporary,
            Error::Unplanned { .. } => FailureKind::Permanent,
            Error::Canceled => FailureKind::Interrupted,
            Error::NotRegular { .. }
            | Error::Malformed { .. }
            | Error::NotWhole { .. }
            | Error::Unsupported { .. }
            | Error::WrongPath { .. }
            | Error::UnknownTensor { .. }
            | Error::NamesDiffer { .. }
            | Error::BadRequest { .. } => FailureKind::Input,
        }
    }

    /// The problems that this error consists of, in most cases itself.
    pub fn into_problems(self) -> Vec<Error> {
        match self {
            Error::Several { problems } => problems,
            error => vec![error],
        }
    }

    /// None of these errors, the only one, or all of them as one.
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

    /// Whether it says that a file is not there.
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, Error::Io { cause, .. } if cause.kind() == io::ErrorKind::NotFound)
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
        Error::UnknownTensor { path: path.into(), tensor: tensor.to_owned(), tensor_count }
    }
}

/// Problems that a message lists.
const LISTED_MAX: usize = 4;

fn joined(problems: &[Error]) -> String {
    let shown: Vec<String> = problems.iter().take(LISTED_MAX).map(Error::to_string).collect();
    match problems.len() - shown.len() {
        0 => shown.join("; "),
        more => format!("{}; and {more} more problems (verify lists all)", shown.join("; ")),
    }
}

/// A word of a command, as a shell takes it: in quotes where it needs them.
pub(crate) fn shell_word(word: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "_-./:=+,@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// The first items of a list, and how many more there are: for messages.
pub(crate) fn listed<T: ToString>(items: &[T], max: usize) -> String {
    let shown: Vec<String> = items.iter().take(max).map(T::to_string).collect();
    match items.len() - shown.len() {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests;
