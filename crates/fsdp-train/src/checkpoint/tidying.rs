//! What is done for checkpoints between two saves, behind the steps: old ones are removed, and disk space for the next one
//! is set aside.

use std::sync::Arc;
use std::thread::JoinHandle;

use super::SaveOptions;
use crate::error::TrainError;

/// The work under way, in a thread of the first rank.
pub(crate) struct Tidying {
    thread: Option<JoinHandle<Tidied>>,
}

/// What came of it.
pub(crate) struct Tidied {
    /// Whether all that was to be removed is.
    pub(crate) pruned: Result<(), TrainError>,
    /// Whether the next save has its space, as far as that was asked for.
    pub(crate) reserved: Result<(), TrainError>,
}

impl Tidying {
    /// Begins. The state after `proven` steps is known to give a finite loss, those of the steps `best` are kept. Space is
    /// set aside if `reserves`: not while a save is being written, which may need what is left.
    ///
    /// # Errors
    /// [`TrainError::SaveThread`].
    pub(crate) fn begin(
        options: &Arc<SaveOptions>,
        proven: u64,
        best: Vec<u64>,
        reserves: bool,
    ) -> Result<Self, TrainError> {
        let options = Arc::clone(options);
        let tidy = move || Tidied {
            pruned: options.prune(proven, &best),
            reserved: if reserves { options.reserve() } else { Ok(()) },
        };
        let thread = std::thread::Builder::new().name("tidy checkpoints".to_owned());
        let thread = thread.spawn(tidy).map_err(|source| TrainError::SaveThread { source })?;
        Ok(Self { thread: Some(thread) })
    }

    /// Waits for the end.
    pub(crate) fn finish(mut self) -> Tidied {
        let thread = self.thread.take().expect("it is waited for once");
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl Drop for Tidying {
    fn drop(&mut self) {
        // The run has failed, and whoever cleans up behind it must not meet this thread.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
