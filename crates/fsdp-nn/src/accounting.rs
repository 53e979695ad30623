//! The logical account of one rank's memory: bytes in use and their peaks, by category.
//!
//! It counts what was asked for, not where it lies: storage that is pooled, shared or not yet taken does not
//! matter here. A [`Lease`] is one entry; the account closes it when the last handle of a buffer is dropped.

use std::sync::{Arc, Mutex, PoisonError};

use fsdp_core::DType;
use fsdp_core::memory::{Category, Usage};

/// The counters of one rank.
#[derive(Debug, Default)]
pub struct Account {
    usage: Mutex<Usage>,
}

impl Account {
    /// Counts a new buffer.
    pub fn open(self: &Arc<Self>, category: Category, dtype: DType, len: usize) -> Arc<Lease> {
        let bytes = len * dtype.size_bytes();
        self.change(|usage| {
            let slot = category as usize;
            usage.live_bytes[slot] += bytes;
            usage.peak_bytes[slot] = usage.peak_bytes[slot].max(usage.live_bytes[slot]);
            let total = usage.live_bytes.iter().sum();
            usage.total_peak_bytes = usage.total_peak_bytes.max(total);
        });
        Arc::new(Lease { account: Arc::clone(self), category, bytes })
    }

    /// Forgets the peaks: they are what is in use now.
    pub fn reset_peaks(&self) {
        self.change(|usage| {
            usage.peak_bytes = usage.live_bytes;
            usage.total_peak_bytes = usage.live_bytes.iter().sum();
        });
    }

    /// The counters now.
    pub fn usage(&self) -> Usage {
        *self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, edit: impl FnOnce(&mut Usage)) {
        edit(&mut self.usage.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// One counted buffer; all its handles share the lease.
#[derive(Debug)]
pub struct Lease {
    account: Arc<Account>,
    category: Category,
    bytes: usize,
}

impl Lease {
    /// Counts one request to the backing allocator.
    pub fn count_allocation(&self) {
        self.account.change(|usage| usage.allocations += 1);
    }

    /// What the buffer is for.
    pub fn category(&self) -> Category {
        self.category
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.account.change(|usage| usage.live_bytes[self.category as usize] -= self.bytes);
    }
}
