//! Work on checkpoints between two saves, in the background: deletes old ones and reserves disk space for the next.

use std::sync::Arc;
use std::thread::JoinHandle;

use super::SaveOptions;
use crate::error::TrainError;

/// The work in progress, in a thread of the first rank.
pub(crate) struct Cleanup {
    thread: Option<JoinHandle<CleanupResult>>,
}

/// The results of the work.
pub(crate) struct CleanupResult {
    /// Whether all checkpoints that are not kept were deleted.
    pub(crate) pruned: Result<(), TrainError>,
    /// Whether space for the next save was reserved, if that was requested.
    pub(crate) reserved: Result<(), TrainError>,
}

impl Cleanup {
    /// Starts the work. The state after `proven` steps is known to give a sound loss, and checkpoints of the steps
    /// `best` are kept. Space is reserved only if `reserves`: not during a save, which may need the remaining space.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(crate) fn begin(
        options: &Arc<SaveOptions>,
        proven: u64,
        best: Vec<u64>,
        reserves: bool,
    ) -> Result<Self, TrainError> {
        let options = Arc::clone(options);
        let tidy = move || CleanupResult {
            pruned: options.prune(proven, &best),
            reserved: if reserves { options.reserve() } else { Ok(()) },
        };
        let thread = std::thread::Builder::new().name("tidy checkpoints".to_owned());
        let thread =
            thread.spawn(tidy).map_err(|source| TrainError::no_thread("deletes old checkpoints", &source))?;
        Ok(Self { thread: Some(thread) })
    }

    /// Waits until the work is done.
    pub(crate) fn finish(mut self) -> CleanupResult {
        let thread = self.thread.take().expect("it is waited for once");
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl Drop for Cleanup {
    fn drop(&mut self) {
        // The run has failed; the cleanup that follows must not run concurrently with this thread.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
