//! What a store says, as errors of files.

use std::{error::Error as _, io};

/// Why a store did not do what it was asked for. It comes inside an [`io::Error`].
#[derive(Debug, thiserror::Error)]
pub(super) enum StoreFault {
    /// Objects keep their names.
    #[error("object stores can not give an object another name")]
    NoRenames,
    /// The store said so, or nothing, after all retries.
    #[error("{0}{1}")]
    Store(String, &'static str),
}

/// The error of a store as that of a file.
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
        // Requests were repeated already; the network or the service may be back later.
        _ => (
            io::ErrorKind::TimedOut,
            "; check that the service can be reached, and credentials in the environment",
        ),
    };
    io::Error::new(kind, StoreFault::Store(words(&error), advice))
}

/// The message with its causes, as far as it does not say them already.
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
