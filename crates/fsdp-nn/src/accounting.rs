//! Memory accounting of one rank: bytes in use and their peaks, by category.
//!
//! The account counts what was requested, independent of whether the storage is pooled, shared or not yet allocated.
//! A [`Lease`] is one entry; it is closed when the last handle of its buffer is dropped.

use std::sync::{Arc, Mutex, PoisonError};

use fsdp_core::DType;
use fsdp_core::memory::{Bytes, Category, Usage};
use fsdp_core::schedule::Place;

/// The memory counters of one rank.
#[derive(Debug, Default)]
pub struct Account {
    usage: Mutex<Usage>,
}

impl Account {
    /// Counts a new device buffer.
    pub fn open(self: &Arc<Self>, category: Category, dtype: DType, len: usize) -> Arc<Lease> {
        self.lease(Place::Device, category, dtype, len)
    }

    /// Counts a new host buffer.
    pub fn open_host(self: &Arc<Self>, category: Category, dtype: DType, len: usize) -> Arc<Lease> {
        self.lease(Place::Host, category, dtype, len)
    }

    fn lease(self: &Arc<Self>, place: Place, category: Category, dtype: DType, len: usize) -> Arc<Lease> {
        let bytes = len * dtype.size_bytes();
        self.change(|usage| counters(usage, place).add(category, bytes));
        Arc::new(Lease { account: Arc::clone(self), place, category, bytes })
    }

    /// Resets the peaks to the current usage.
    pub fn reset_peaks(&self) {
        self.change(|usage| {
            usage.device.reset_peaks();
            usage.host.reset_peaks();
        });
    }

    /// Returns the current counters.
    pub fn usage(&self) -> Usage {
        *self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, edit: impl FnOnce(&mut Usage)) {
        edit(&mut self.usage.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// The counters of a memory.
fn counters(usage: &mut Usage, place: Place) -> &mut Bytes {
    match place {
        Place::Device => &mut usage.device,
        Place::Host => &mut usage.host,
    }
}

/// The account entry of one buffer, shared by all its handles.
#[derive(Debug)]
pub struct Lease {
    account: Arc<Account>,
    place: Place,
    category: Category,
    bytes: usize,
}

impl Lease {
    /// Counts one request to the backing allocator.
    pub fn count_allocation(&self) {
        self.account.change(|usage| usage.allocations += 1);
    }

    /// Returns the buffer's category.
    pub fn category(&self) -> Category {
        self.category
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.account.change(|usage| counters(usage, self.place).remove(self.category, self.bytes));
    }
}
