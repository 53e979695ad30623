//! Locks, and waiting for what stands behind them.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A value under a lock, and whoever waits for a change of it.
#[derive(Default)]
pub(crate) struct Monitor<T> {
    value: Mutex<T>,
    changed: Condvar,
}

impl<T> Monitor<T> {
    /// The value. Whoever changes it wakes those who wait, by [`Monitor::notify`].
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        lock(&self.value)
    }

    /// Wakes whoever waits: the value has changed.
    pub(crate) fn notify(&self) {
        self.changed.notify_all();
    }

    /// Lets go of the value until it has changed, for `limit` at most.
    pub(crate) fn wait<'a>(&self, value: MutexGuard<'a, T>, limit: Duration) -> MutexGuard<'a, T> {
        self.changed.wait_timeout(value, limit).unwrap_or_else(PoisonError::into_inner).0
    }
}

/// What a mutex protects, also when somebody panicked who held it: in this crate every change under a lock is complete
/// before anything can panic, and a rank that panicked has failed the world anyway.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
