//! The name under which a process that is not the first of several writes.

use std::sync::{PoisonError, RwLock};

/// The name of this process, if it is not the first of several.
static PROCESS_NAME: RwLock<Option<String>> = RwLock::new(None);

/// Names this process as not the first: errors and log lines then carry the name, and everything else goes to the log,
/// since the first process prints it.
pub(crate) fn set_process_name(name: String) {
    *PROCESS_NAME.write().unwrap_or_else(PoisonError::into_inner) = Some(name);
}

/// The name of this process; `None` for the first.
pub(crate) fn process_name() -> Option<String> {
    PROCESS_NAME.read().unwrap_or_else(PoisonError::into_inner).clone()
}
