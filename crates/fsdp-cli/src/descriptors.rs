//! The limit on open files of a process that is one of several.
//!
//! A process that cannot accept a connection for want of a file descriptor leaves the other end waiting until a time
//! limit. So a limit that is too low for any run is reported before there is a connection.

use rustix::process::{Resource, getrlimit};

use crate::error::CliError;

/// What a process of a training run opens besides a connection to each other process: standard streams, the folder and
/// the ports where processes meet, pipes of signals, the lock, the metrics, the model, and two files of a checkpoint.
const OWN: u64 = 16;

/// Checks that a process of a world of `processes` processes may open as many files as it will.
///
/// # Errors
/// [`CliError::Descriptors`].
pub(crate) fn expect(processes: usize) -> Result<(), CliError> {
    let needed = OWN + processes as u64 - 1;
    match getrlimit(Resource::Nofile).current {
        Some(limit) if processes > 1 && limit < needed => {
            Err(CliError::Descriptors { limit, needed, processes })
        }
        _ => Ok(()),
    }
}
