//! SIGINT, SIGTERM and SIGUSR1: the first one asks to stop; a second SIGINT or SIGTERM exits at once. While there is
//! nothing to save or restore yet, the first one also exits at once.
//!
//! SIGUSR1 does not count as first or second: `fsdp launch` sends it in addition to the SIGTERM that a scheduler sends
//! to all processes, and the order in which two signals arrive is undefined.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fsdp_ckpt::objects::hurry_when;
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::flag;

use crate::error::CliError;
use crate::exit_code::Exit;

/// The signals received so far.
#[derive(Clone, Debug)]
pub(crate) struct StopSignal {
    /// Set by the first signal of any kind.
    pub(crate) stop: Arc<AtomicBool>,
    terminate: Arc<AtomicBool>,
    is_idle: Arc<AtomicBool>,
}

impl StopSignal {
    /// Installs the signal handlers.
    ///
    /// # Errors
    /// [`CliError::Signal`].
    pub(crate) fn install() -> Result<Self, CliError> {
        Self::register(false)
    }

    /// Installs the signal handlers. Until [`StopSignal::begin`], the first signal exits at once: SIGTERM and SIGUSR1
    /// with [`Exit::Temporary`], SIGINT with [`Exit::Interrupted`].
    ///
    /// # Errors
    /// [`CliError::Signal`].
    pub(crate) fn install_idle() -> Result<Self, CliError> {
        Self::register(true)
    }

    /// From this call on, the first signal asks to stop.
    pub(crate) fn begin(&self) {
        self.is_idle.store(false, Ordering::Relaxed);
    }

    fn register(is_idle: bool) -> Result<Self, CliError> {
        let [stop, is_signaled, terminate, is_idle] =
            [false, false, false, is_idle].map(|is_raised| Arc::new(AtomicBool::new(is_raised)));
        let failed = |source| CliError::Signal { source };
        for signal in [SIGTERM, SIGUSR1] {
            flag::register(signal, Arc::clone(&terminate)).map_err(failed)?;
        }
        // Exceeding the file size limit then is an error instead of ending the process.
        flag::register(SIGXFSZ, Arc::default()).map_err(failed)?;
        for (signal, idle_code) in
            [(SIGINT, Exit::Interrupted), (SIGTERM, Exit::Temporary), (SIGUSR1, Exit::Temporary)]
        {
            // Actions run in order of registration: the exit checks the flag before this signal sets it.
            let exit_if = |code: Exit, is_raised: &Arc<AtomicBool>| {
                flag::register_conditional_shutdown(signal, code.code().into(), Arc::clone(is_raised))
            };
            exit_if(idle_code, &is_idle).map_err(failed)?;
            if signal != SIGUSR1 {
                exit_if(Exit::Interrupted, &is_signaled).map_err(failed)?;
                flag::register(signal, Arc::clone(&is_signaled)).map_err(failed)?;
            }
            flag::register(signal, Arc::clone(&stop)).map_err(failed)?;
        }
        hurry_when(Arc::clone(&stop));
        Ok(Self { stop, terminate, is_idle })
    }

    /// Whether SIGTERM or SIGUSR1 was received: a scheduler wants the machine back, and the run should resume
    /// elsewhere.
    pub(crate) fn is_terminated(&self) -> bool {
        self.terminate.load(Ordering::Relaxed)
    }
}
