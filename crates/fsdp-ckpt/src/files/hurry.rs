//! Whether this process should end soon, so that requests are not repeated for long.

#[cfg(feature = "object-store")]
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, atomic::AtomicBool};

/// Set when requests should not be repeated for long.
static HURRY: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// From the moment that the flag is set on, requests to stores that fail are repeated for ten seconds at most: the user or a
/// scheduler waits for this process to end. The first flag that is given counts.
pub fn hurry_when(flag: Arc<AtomicBool>) {
    HURRY.get_or_init(|| flag);
}

/// Whether a flag was [given](hurry_when) and is set.
#[cfg(feature = "object-store")]
pub(super) fn is_hurried() -> bool {
    HURRY.get().is_some_and(|flag| flag.load(Ordering::Relaxed))
}
