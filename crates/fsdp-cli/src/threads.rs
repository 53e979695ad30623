//! The threads that tokenize, initialize and plan, shared by all of this process.

use std::error::Error;
use std::io;

use crate::error::CliError;

/// Starts the threads, one per core. Otherwise the first computation would start them, and panic if it cannot.
///
/// # Errors
/// [`CliError::Start`].
pub(crate) fn start() -> Result<(), CliError> {
    rayon::ThreadPoolBuilder::new().build_global().map_err(|error| {
        let os_error = error.source().and_then(|source| source.downcast_ref::<io::Error>());
        let source = match os_error.and_then(io::Error::raw_os_error) {
            Some(code) => io::Error::from_raw_os_error(code),
            None => io::Error::other(error),
        };
        let what = "one thread per core (RAYON_NUM_THREADS sets another number)".to_owned();
        CliError::Start { what, source }
    })
}
