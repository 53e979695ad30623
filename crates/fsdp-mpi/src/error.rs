//! What goes wrong with an MPI library.

use std::fmt;
use std::io;
use std::path::PathBuf;

use fsdp_core::FailureKind;
use fsdp_core::comm::CommError;

/// One file that was tried in vain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The file, or its bare name for the search of the system's loader.
    pub candidate: PathBuf,
    /// Why it is not the library.
    pub why: String,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = if self.candidate.components().count() == 1 { " (where the loader looks)" } else { "" };
        write!(f, "\n  {}{place}: {}", self.candidate.display(), self.why)
    }
}

/// MPI is missing, does not fit, or failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MpiError {
    /// It is nowhere.
    #[error(
        "no MPI library was found; install Open MPI or MPICH, or name the file in FSDP_MPI_LIBRARY; tried{}",
        tried.iter().map(Attempt::to_string).collect::<String>()
    )]
    NotFound {
        /// Where, in this order.
        tried: Vec<Attempt>,
    },
    /// It is there, but it is not MPI, or far too old.
    #[error("{} has no function {symbol}: it is not MPI, or older than MPI 3", path.display())]
    NoSymbol {
        /// The file.
        path: PathBuf,
        /// What it lacks.
        symbol: &'static str,
    },
    /// Its handles and constants are not known.
    #[error(
        "{} is none of Open MPI, MPICH (or compatible with it) and the standard ABI; it says of itself: {version:?}",
        path.display()
    )]
    Unknown {
        /// The file.
        path: PathBuf,
        /// What it says of itself.
        version: String,
    },
    /// Another part of this process has begun with MPI.
    #[error("MPI is initialised in this process already; it can be used by one world per process")]
    Initialized,
    /// It can not be used by a thread that is not the main one.
    #[error(
        "{} allows no threads (it provides level {provided}, and {needed} is needed): use a build of MPI with threads",
        path.display()
    )]
    Threads {
        /// The file.
        path: PathBuf,
        /// The level that it provides.
        provided: i32,
        /// `MPI_THREAD_FUNNELED`.
        needed: i32,
    },
    /// The thread that owns MPI could not be started.
    #[error("the thread of MPI could not be started: {0}")]
    Thread(#[source] io::Error),
    /// A call failed.
    #[error("{call}: error {code}: {text}")]
    Call {
        /// The function.
        call: &'static str,
        /// What it returned.
        code: i32,
        /// What MPI says to the code.
        text: String,
    },
    /// The thread that owns MPI has ended: the world was finalised, or that thread panicked.
    #[error("the thread of MPI has ended")]
    Ended,
    /// MPI is not finalised after a failure: it would wait for ranks that may never come.
    #[error("MPI is not finalised after a failure: {0}")]
    Failed(#[source] CommError),
    /// Messages are still on their way when the world is to be finalised.
    #[error("{messages} messages of this rank have not ended after {seconds} s, so MPI is not finalised")]
    Unfinished {
        /// How many.
        messages: usize,
        /// The time limit.
        seconds: u64,
    },
}

impl MpiError {
    /// What this failure calls for.
    pub fn kind(&self) -> FailureKind {
        match self {
            MpiError::NotFound { .. }
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
