//! Locks and condition variables.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A value under a lock, with a condition variable for its changes.
#[derive(Default)]
pub(crate) struct Monitor<T> {
    value: Mutex<T>,
    changed: Condvar,
}

impl<T> Monitor<T> {
    /// Locks the value. After a change, call [`Monitor::notify`].
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        lock(&self.value)
    }

    /// Wakes all waiting threads after a change of the value.
    pub(crate) fn notify(&self) {
        self.changed.notify_all();
    }

    /// Releases the lock until the value has changed, for `limit` at most.
    pub(crate) fn wait<'a>(&self, value: MutexGuard<'a, T>, limit: Duration) -> MutexGuard<'a, T> {
        self.changed.wait_timeout(value, limit).unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Locks a mutex, ignoring poison: in this crate every change under a lock is complete before anything can panic, and a
/// rank that panicked has failed the world anyway.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
