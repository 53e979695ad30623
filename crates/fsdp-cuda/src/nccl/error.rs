//! Versions, result codes and errors of NCCL.
//!
//! Result codes are integers, so an unknown one is just a number, not undefined behavior.

use std::fmt;
use std::path::PathBuf;

use crate::library::{LibraryError, NCCL};

/// A version of NCCL, encoded as by `ncclGetVersion`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32);

impl Version {
    /// The oldest supported version: 2.18.1, with `ncclCommSplit`.
    pub(crate) const NEEDED: Version = Version(2_18_01);
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Up to 2.8, `ncclGetVersion` returns two digits less.
        let major = if self.0 < 10_000 { 1_000 } else { 10_000 };
        write!(f, "{}.{}.{}", self.0 / major, self.0 % major / 100, self.0 % 100)
    }
}

/// A result code of an NCCL call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(pub i32);

impl Code {
    pub(crate) const SUCCESS: Self = Self(0);
    pub(crate) const INTERNAL_ERROR: Self = Self(3);
    pub(crate) const IN_PROGRESS: Self = Self(7);
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            1 => "ncclUnhandledCudaError",
            2 => "ncclSystemError",
            3 => "ncclInternalError",
            4 => "ncclInvalidArgument",
            5 => "ncclInvalidUsage",
            6 => "ncclRemoteError",
            code => return write!(f, "unknown result {code}"),
        })
    }
}

/// Why NCCL could not be used, or which call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// The library cannot be opened.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// The library is too old.
    #[error(
        "{} is NCCL {found}, but {} or newer is needed; {}",
        path.display(), Version::NEEDED, NCCL.install
    )]
    TooOld {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: Version,
    },
    /// A call failed.
    #[error(
        "{call}: {code}: {text}{}",
        if detail.is_empty() { String::new() } else { format!(" (NCCL's last message: {detail})") }
    )]
    Call {
        /// The function.
        call: &'static str,
        /// The result code.
        code: Code,
        /// NCCL's description of the code.
        text: String,
        /// NCCL's last message, which may concern another call; may be empty.
        detail: String,
    },
}
