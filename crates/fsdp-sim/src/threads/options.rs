//! The options of ranks that run as threads.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use fsdp_comm::ranks::STACK_BYTES;

use crate::fault::Intercept;

/// Options of ranks that run as threads.
#[derive(Clone, Debug)]
pub struct ThreadOptions {
    /// Maximum number of ranks that run at a time; ranks blocked in a collective do not count. At least 1.
    pub cores: usize,
    /// The world fails if ranks wait in a collective and no rank has entered or left one for this long. (It fails at
    /// once if no rank can make progress.)
    pub timeout: Duration,
    /// Whether the outputs of an all-gather share storage, if the memory supports it.
    pub share_unsharded: bool,
    /// Stack size of each rank's thread, in bytes.
    pub stack_bytes: usize,
    /// Changes the calls of ranks, to test failures; `None` changes nothing.
    pub intercept: Option<Arc<dyn Intercept>>,
}

impl Default for ThreadOptions {
    /// All cores of this machine, a timeout of ten minutes, no sharing, no intercept.
    fn default() -> Self {
        Self {
            cores: thread::available_parallelism().map_or(1, usize::from),
            timeout: Duration::from_secs(600),
            share_unsharded: false,
            stack_bytes: STACK_BYTES,
            intercept: None,
        }
    }
}
