//! Classifies failures by whether a retry can help, for job schedulers and exit codes.
//!
//! Every error of this workspace is classified here or next to its type, in a `match` without a wildcard, so that a new
//! variant does not compile until it has been classified.

use std::io;

use crate::comm::CommError;
use crate::error::Error;
use crate::out_of_memory::MemoryKind;

/// How to respond to a failure. When several things fail at once, the greatest kind counts: a retry helps only if it
/// helps all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FailureKind {
    /// An outside cause: a full disk, a late rank, a device. The same command may succeed later.
    Temporary,
    /// The run failed, and would fail again in the same way.
    Permanent,
    /// Wrong or missing input: a key, a file, a device. It must be changed before a retry.
    Input,
    /// A stop was requested.
    Interrupted,
}

/// Error numbers that have no [`io::ErrorKind`] of their own.
mod errno {
    /// Input or output error.
    pub(super) const EIO: i32 = 5;
    /// Too many open files in the whole system.
    pub(super) const ENFILE: i32 = 23;
    /// Too many open files in this process.
    pub(super) const EMFILE: i32 = 24;
    /// No locks available (Linux).
    pub(super) const ENOLCK: i32 = 37;
    /// Remote input or output error (Linux).
    pub(super) const EREMOTEIO: i32 = 121;
}

/// Whether an operating system error can pass without a change of the command.
fn is_temporary(error: &io::Error) -> bool {
    use errno::{EIO, EMFILE, ENFILE, ENOLCK, EREMOTEIO};
    let is_known = matches!(
        error.kind(),
        io::ErrorKind::StorageFull
            | io::ErrorKind::QuotaExceeded
            | io::ErrorKind::StaleNetworkFileHandle
            | io::ErrorKind::TimedOut
            | io::ErrorKind::WouldBlock
            | io::ErrorKind::ResourceBusy
            | io::ErrorKind::OutOfMemory
            | io::ErrorKind::Interrupted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::NotConnected
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::NetworkUnreachable
            | io::ErrorKind::NetworkDown
    );
    is_known || matches!(error.raw_os_error(), Some(EIO | ENFILE | EMFILE | ENOLCK | EREMOTEIO))
}

impl FailureKind {
    /// Classifies a failed file operation: if it is not temporary, the path, its permissions or its content is wrong.
    pub fn of_io(error: &io::Error) -> Self {
        if is_temporary(error) { FailureKind::Temporary } else { FailureKind::Input }
    }
}

impl Error {
    /// Classifies this failure.
    pub fn kind(&self) -> FailureKind {
        match self {
            Error::Mesh { .. }
            | Error::Distribution { .. }
            | Error::Model { .. }
            | Error::WrapClass { .. }
            | Error::TiedAcrossUnits { .. }
            | Error::Policy { .. }
            | Error::Refused(_) => FailureKind::Input,
            Error::Schedule(_)
            | Error::Viewed { .. }
            | Error::BufferInUse { .. }
            | Error::Shared { .. }
            | Error::Released { .. }
            | Error::Parameter { .. }
            | Error::Program { .. } => FailureKind::Permanent,
            // A device belongs to the run alone. Other programs use the machine's memory too, and its limits can be raised.
            Error::OutOfMemory(error) if error.kind != MemoryKind::Host => FailureKind::Permanent,
            Error::Device(_) | Error::OutOfMemory(_) => FailureKind::Temporary,
            Error::Comm(error) => error.kind(),
        }
    }
}

impl CommError {
    /// Classifies this failure. A rank that failed without a reported kind counts as temporary: it may succeed next
    /// time.
    pub fn kind(&self) -> FailureKind {
        match self {
            CommError::Mismatch { .. }
            | CommError::Order { .. }
            | CommError::Differs { .. }
            | CommError::Length { .. }
            | CommError::Type { .. }
            | CommError::IntegerAverage { .. }
            | CommError::Shared { .. } => FailureKind::Permanent,
            CommError::PeerFailed { .. }
            | CommError::Missing { .. }
            | CommError::TimedOut { .. }
            | CommError::Transport { .. } => FailureKind::Temporary,
            CommError::Aborted { kind, .. } => *kind,
        }
    }
}

#[cfg(test)]
mod tests;
