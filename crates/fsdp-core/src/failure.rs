//! Whether a failure is worth another try: what schedulers of jobs ask, and what exit codes say.
//!
//! Every error of this workspace is classified here or beside its type, in a `match` without a wildcard: a new variant
//! does not compile until somebody has thought about it.

use std::io;

use crate::comm::CommError;
use crate::error::Error;

/// What a failure calls for. The order says which one counts when several things failed at once: another try helps only
/// if it helps all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FailureKind {
    /// Something outside failed: a full disk, a rank that is late, a device. The same command can succeed later.
    Temporary,
    /// The run failed, and would fail the same way again.
    Permanent,
    /// What was given is wrong or missing: a key, a file, a device. Somebody has to change it first.
    Input,
    /// Somebody asked to stop.
    Interrupted,
}

/// Error numbers that have no [`io::ErrorKind`] of their own.
mod errno {
    /// Input or output failed.
    pub(super) const EIO: i32 = 5;
    /// The whole system has too many open files.
    pub(super) const ENFILE: i32 = 23;
    /// This process has too many open files.
    pub(super) const EMFILE: i32 = 24;
    /// No locks are left (Linux).
    pub(super) const ENOLCK: i32 = 37;
    /// Input or output failed on the other machine (Linux).
    pub(super) const EREMOTEIO: i32 = 121;
}

/// Whether what the operating system says can pass without a change of the command.
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
    /// The kind of a failed operation on a file: what can not pass is wrong with the path, its permissions or its content.
    pub fn of_io(error: &io::Error) -> Self {
        if is_temporary(error) { FailureKind::Temporary } else { FailureKind::Input }
    }
}

impl Error {
    /// What this failure calls for.
    pub fn kind(&self) -> FailureKind {
        match self {
            Error::Mesh { .. }
            | Error::Model { .. }
            | Error::WrapClass { .. }
            | Error::TiedAcrossUnits { .. }
            | Error::Policy { .. }
            | Error::Refused(_) => FailureKind::Input,
            Error::Schedule(_)
            | Error::Viewed { .. }
            | Error::Absent { .. }
            | Error::Shared { .. }
            | Error::Released { .. }
            | Error::OutOfMemory(_)
            | Error::Parameter { .. }
            | Error::Program { .. } => FailureKind::Permanent,
            Error::Device(_) => FailureKind::Temporary,
            Error::Comm(error) => error.kind(),
        }
    }
}

impl CommError {
    /// What this failure calls for. Of a rank that failed without saying how, nothing better is known than that it may
    /// not do so again.
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
