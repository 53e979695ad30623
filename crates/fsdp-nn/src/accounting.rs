//! The logical account of one rank's memory: bytes in use and their peaks, by category.
//!
//! It counts what was asked for, not where it lies: storage that is pooled, shared or not yet taken does not
//! matter here. A [`Lease`] is one entry; the account closes it when the last handle of a buffer is dropped.

use std::sync::{Arc, Mutex, PoisonError};

use fsdp_core::DType;
use fsdp_core::memory::{Bytes, Category, Usage};

/// The counters of one rank.
#[derive(Debug, Default)]
pub struct Account {
    usage: Mutex<Usage>,
}

impl Account {
    /// Counts a new buffer of the device.
    pub fn open(self: &Arc<Self>, category: Category, dtype: DType, len: usize) -> Arc<Lease> {
        self.lease(Place::Device, category, dtype, len)
    }

    /// Counts a new buffer in host memory.
    pub fn open_host(self: &Arc<Self>, category: Category, dtype: DType, len: usize) -> Arc<Lease> {
        self.lease(Place::Host, category, dtype, len)
    }

    fn lease(self: &Arc<Self>, place: Place, category: Category, dtype: DType, len: usize) -> Arc<Lease> {
        let bytes = len * dtype.size_bytes();
        self.change(|usage| place.of(usage).add(category, bytes));
        Arc::new(Lease { account: Arc::clone(self), place, category, bytes })
    }

    /// Forgets the peaks: they are what is in use now.
    pub fn reset_peaks(&self) {
        self.change(|usage| {
            usage.device.reset_peaks();
            usage.host.reset_peaks();
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

/// Whose memory a buffer takes.
#[derive(Clone, Copy, Debug)]
enum Place {
    Device,
    Host,
}

impl Place {
    fn of(self, usage: &mut Usage) -> &mut Bytes {
        match self {
            Place::Device => &mut usage.device,
            Place::Host => &mut usage.host,
        }
    }
}

/// One counted buffer; all its handles share the lease.
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

    /// What the buffer is for.
    pub fn category(&self) -> Category {
        self.category
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.account.change(|usage| self.place.of(usage).remove(self.category, self.bytes));
    }
}
