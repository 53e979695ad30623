//! Classifies failures by whether a retry can help, for job schedulers and exit codes.
//!
//! Every error of this workspace is classified next to its type, in a `match` without a wildcard, so that a new
//! variant does not compile until it has been classified.

use std::io;

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

#[cfg(test)]
mod tests;
