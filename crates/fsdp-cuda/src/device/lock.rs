//! Locks of this room.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks what is whole before anything under the lock can panic: a poisoned lock says nothing then.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
