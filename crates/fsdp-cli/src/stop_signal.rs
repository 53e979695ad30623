//! SIGINT and SIGTERM: the first one asks to stop after the step, the second one exits at once.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::error::CliError;

/// The exit code of a run that was interrupted twice, as shells report SIGINT.
const INTERRUPTED: i32 = 130;

/// A flag that the first signal raises.
///
/// # Errors
/// [`CliError::Signal`].
pub(crate) fn install() -> Result<Arc<AtomicBool>, CliError> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // Actions run in the order of registration: the exit looks at the flag before this signal raises it.
        flag::register_conditional_shutdown(signal, INTERRUPTED, Arc::clone(&stop))
            .and_then(|_| flag::register(signal, Arc::clone(&stop)))
            .map_err(|source| CliError::Signal { source })?;
    }
    Ok(stop)
}
