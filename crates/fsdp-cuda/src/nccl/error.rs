//! Versions, result codes and errors of NCCL.
//!
//! Result codes are integers: one that this table does not know is [`Code::Unknown`], not undefined behaviour.

use std::fmt;
use std::path::PathBuf;

use crate::library::{LibraryError, NCCL};

/// A version of NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32);

impl Version {
    /// The oldest that will do: the first with `ncclCommSplit`.
    pub const NEEDED: Version = Version(2_18_01);
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Up to 2.8, `ncclGetVersion` has two digits less.
        let major = if self.0 < 10_000 { 1_000 } else { 10_000 };
        write!(f, "{}.{}.{}", self.0 / major, self.0 % major / 100, self.0 % 100)
    }
}

/// What a call of NCCL returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// `ncclUnhandledCudaError`
    UnhandledCudaError,
    /// `ncclSystemError`
    SystemError,
    /// `ncclInternalError`
    InternalError,
    /// `ncclInvalidArgument`
    InvalidArgument,
    /// `ncclInvalidUsage`
    InvalidUsage,
    /// `ncclRemoteError`
    RemoteError,
    /// A code that is newer than this table.
    Unknown(i32),
}

/// What a code says: done, under way, or failed.
pub(crate) enum Outcome {
    Done,
    InProgress,
    Failed(Code),
}

impl Outcome {
    pub(crate) fn of(code: i32) -> Self {
        Outcome::Failed(match code {
            0 => return Outcome::Done,
            7 => return Outcome::InProgress,
            1 => Code::UnhandledCudaError,
            2 => Code::SystemError,
            3 => Code::InternalError,
            4 => Code::InvalidArgument,
            5 => Code::InvalidUsage,
            6 => Code::RemoteError,
            code => Code::Unknown(code),
        })
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Code::Unknown(code) => write!(f, "unknown result {code}"),
            known => write!(f, "nccl{known:?}"),
        }
    }
}

/// NCCL is missing, does not fit, or failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// The library can not be opened.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// The library is too old.
    #[error("{} is NCCL {found}, but {needed} or newer is needed; {}", path.display(), NCCL.install)]
    TooOld {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: Version,
        /// The oldest that will do.
        needed: Version,
    },
    /// A call failed.
    #[error("{call}: {code}: {text}{}", Detail(detail))]
    Call {
        /// The function.
        call: &'static str,
        /// What it returned.
        code: Code,
        /// What NCCL says to the code.
        text: String,
        /// The last thing that NCCL noted, which may be of another call; may be empty.
        detail: String,
    },
}

struct Detail<'a>(&'a str);

impl fmt::Display for Detail<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, " (NCCL's last message: {})", self.0) }
    }
}
