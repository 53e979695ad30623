//! Converts errors of object stores to I/O errors.

use std::{error::Error as _, io};

/// The reason why a store did not fulfill a request. Wrapped in an [`io::Error`].
#[derive(Debug, thiserror::Error)]
pub(super) enum StoreFault {
    /// Objects cannot be renamed.
    #[error("object stores cannot rename objects")]
    NoRenames,
    /// The store reported an error or did not respond, after all retries.
    #[error("{0}{1}")]
    Store(String, &'static str),
}

/// Converts the error of a store to an I/O error.
pub(super) fn failed(error: object_store::Error) -> io::Error {
    use object_store::Error;
    let (kind, advice) = match &error {
        Error::NotFound { .. } => (io::ErrorKind::NotFound, ""),
        Error::AlreadyExists { .. } => (io::ErrorKind::AlreadyExists, ""),
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => {
            (io::ErrorKind::PermissionDenied, "; check credentials and region in the environment")
        }
        Error::Precondition { .. } => {
            (io::ErrorKind::InvalidData, "; the object was changed while it was read")
        }
        Error::InvalidPath { .. } => (io::ErrorKind::InvalidInput, ""),
        Error::NotSupported { .. } | Error::NotImplemented { .. } => (io::ErrorKind::Unsupported, ""),
        // Requests have been retried already; the network or the service may recover later.
        _ => (
            io::ErrorKind::TimedOut,
            "; check that the service can be reached, and credentials in the environment",
        ),
    };
    io::Error::new(kind, StoreFault::Store(words(&error), advice))
}

/// The message, followed by those of its causes that it does not contain.
fn words(error: &object_store::Error) -> String {
    let mut words = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let more = inner.to_string();
        if !words.contains(&more) {
            words = format!("{words}: {more}");
        }
        cause = inner.source();
    }
    words
}
