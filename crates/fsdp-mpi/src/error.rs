//! Errors of an MPI library.

use std::fmt;
use std::io;
use std::path::PathBuf;

use fsdp_core::FailureKind;
use fsdp_core::comm::CommError;

/// A candidate for the library that could not be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// Path of the file, or a bare name that the system's loader searches for.
    pub candidate: PathBuf,
    /// Why it could not be opened.
    pub why: String,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = if self.candidate.components().count() == 1 { " (where the loader looks)" } else { "" };
        write!(f, "\n  {}{place}: {}", self.candidate.display(), self.why)
    }
}

/// MPI is missing, incompatible, or failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MpiError {
    /// No library was found.
    #[error(
        "no MPI library was found; install Open MPI or MPICH, or name the file in FSDP_MPI_LIBRARY; tried{}",
        tried.iter().map(Attempt::to_string).collect::<String>()
    )]
    NotFound {
        /// The candidates, in the order in which they were tried.
        tried: Vec<Attempt>,
    },
    /// This program cannot open libraries.
    #[error(
        "this fsdp is a static binary, which cannot open MPI; use the Python package fsdp or a build from source, or \
         run.transport = \"tcp\""
    )]
    Static,
    /// The library is not MPI, or older than MPI 3.
    #[error("{} has no function {symbol}: it is not MPI, or older than MPI 3", path.display())]
    NoSymbol {
        /// Path of the library.
        path: PathBuf,
        /// The missing function or variable.
        symbol: &'static str,
    },
    /// The values of its handles and constants are not known.
    #[error(
        "{} is neither Open MPI, nor MPICH (or compatible), nor of the standard ABI; its version text: \
         {version:?}",
        path.display()
    )]
    Unknown {
        /// Path of the library.
        path: PathBuf,
        /// The version string of the library.
        version: String,
    },
    /// Another part of this process has initialized MPI.
    #[error("MPI is already initialized in this process; only one world per process can use it")]
    Initialized,
    /// The library was built without support for threads.
    #[error(
        "{} does not support threads (it provides level {provided}, but {needed} is needed): use a build of \
         MPI with threads",
        path.display()
    )]
    Threads {
        /// Path of the library.
        path: PathBuf,
        /// The thread level that the library provides.
        provided: i32,
        /// The required thread level, `MPI_THREAD_FUNNELED`.
        needed: i32,
    },
    /// The thread that owns MPI could not be started.
    #[error("cannot start the MPI thread: {0}")]
    Thread(#[source] io::Error),
    /// A call of MPI failed.
    #[error("{call}: error {code}: {text}")]
    Call {
        /// The name of the function.
        call: &'static str,
        /// The error code that it returned.
        code: i32,
        /// MPI's text for the code.
        text: String,
    },
    /// The thread that owns MPI has ended: the world was finalized, or that thread panicked.
    #[error("the MPI thread has ended")]
    Ended,
    /// MPI is not finalized after a failure, because that would wait for ranks that may never come.
    #[error("MPI is not finalized after a failure: {0}")]
    Failed(#[source] CommError),
    /// Messages are still in flight although the world is to be finalized.
    #[error("{messages} messages of this rank have not ended after {seconds} s, so MPI is not finalized")]
    Unfinished {
        /// Number of messages in flight.
        messages: usize,
        /// The time limit, in seconds.
        seconds: u64,
    },
}

impl MpiError {
    /// Classifies the failure.
    pub fn kind(&self) -> FailureKind {
        match self {
            MpiError::NotFound { .. }
            | MpiError::Static
            | MpiError::NoSymbol { .. }
            | MpiError::Unknown { .. }
            | MpiError::Threads { .. } => FailureKind::Input,
            MpiError::Initialized => FailureKind::Permanent,
            MpiError::Thread(_) | MpiError::Call { .. } | MpiError::Ended | MpiError::Unfinished { .. } => {
                FailureKind::Temporary
            }
            MpiError::Failed(error) => error.kind(),
        }
    }
}
