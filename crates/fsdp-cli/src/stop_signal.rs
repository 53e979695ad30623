//! SIGINT and SIGTERM: the first one asks to stop, the second one exits at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::error::CliError;
use crate::exit_code::Exit;

/// What signals have asked for so far.
#[derive(Clone, Debug)]
pub(crate) struct StopSignal {
    /// Raised by the first signal of either kind.
    pub(crate) stop: Arc<AtomicBool>,
    terminate: Arc<AtomicBool>,
}

impl StopSignal {
    /// Handles signals from now on.
    ///
    /// # Errors
    /// [`CliError::Signal`].
    pub(crate) fn install() -> Result<Self, CliError> {
        let (stop, terminate) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let failed = |source| CliError::Signal { source };
        flag::register(SIGTERM, Arc::clone(&terminate)).map_err(failed)?;
        for signal in [SIGINT, SIGTERM] {
            // Actions run in the order of registration: the exit looks at the flag before this signal raises it.
            flag::register_conditional_shutdown(signal, Exit::Interrupted.code().into(), Arc::clone(&stop))
                .and_then(|_| flag::register(signal, Arc::clone(&stop)))
                .map_err(failed)?;
        }
        Ok(Self { stop, terminate })
    }

    /// Whether SIGTERM was among them: a scheduler wants the machine back, and the run is to go on elsewhere.
    pub(crate) fn is_terminated(&self) -> bool {
        self.terminate.load(Ordering::Relaxed)
    }
}
