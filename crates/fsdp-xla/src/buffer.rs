//! Handles of storage, and what it holds.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use fsdp_core::DType;
use fsdp_core::memory::{Buffer, Category};
use fsdp_nn::HostBuffer;
use fsdp_nn::accounting::{Account, Lease};

use crate::ffi::DeviceBuffer;
use crate::hlo::{Shape, Value};

/// What storage holds.
pub(crate) enum Content {
    /// Nothing that anybody may read.
    Undefined,
    /// Zeros, which nobody has room for before they are read.
    Zero,
    /// Elements on the host, which go to the device when a program reads them.
    Host(HostBuffer),
    /// Elements on the device, and a copy of them if somebody has read them.
    Device(Arc<DeviceBuffer>, Option<HostBuffer>),
    /// Values of the program that is being traced, by their first element. Between them there may be gaps, which are
    /// undefined.
    Traced(BTreeMap<usize, Value>),
}

/// Storage of so many elements.
pub(crate) struct Storage {
    pub(crate) dtype: DType,
    pub(crate) len: usize,
    /// Elements that it has in programs, if these are more.
    room: OnceLock<usize>,
    content: Mutex<Content>,
    /// Counts it for as long as it lives.
    lease: Arc<Lease>,
}

impl Storage {
    /// What it holds. A rank is one thread, so nobody waits.
    pub(crate) fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what it holds, and leaves nothing.
    pub(crate) fn take(&self) -> Content {
        std::mem::replace(&mut *self.content(), Content::Undefined)
    }

    pub(crate) fn put(&self, content: Content) {
        *self.content() = content;
    }

    pub(crate) fn category(&self) -> Category {
        self.lease.category()
    }

    /// Elements that it has in programs, which are as many on all ranks; behind its own are some that nobody reads.
    pub(crate) fn room(&self) -> usize {
        self.room.get().copied().unwrap_or(self.len)
    }

    /// Whether [`Storage::widen`] was called.
    pub(crate) fn is_widened(&self) -> bool {
        self.room.get().is_some()
    }

    /// Says, before a program has it, how many elements it has in programs.
    pub(crate) fn widen(&self, room: usize) {
        assert!(room >= self.len, "{} elements have no room in {room}", self.len);
        assert_eq!(*self.room.get_or_init(|| room), room, "storage is as long in all programs");
    }

    /// As one tensor: a vector.
    pub(crate) fn shape(&self) -> Shape {
        Shape::new(&[self.room()], self.dtype.into())
    }
}

/// A buffer of an [`XlaMemory`](crate::XlaMemory).
#[derive(Clone)]
pub struct XlaBuffer {
    pub(crate) storage: Arc<Storage>,
}

impl XlaBuffer {
    pub(crate) fn new(account: &Arc<Account>, category: Category, dtype: DType, len: usize) -> Self {
        let lease = account.open(category, dtype, len);
        let content = Mutex::new(Content::Undefined);
        Self { storage: Arc::new(Storage { dtype, len, room: OnceLock::new(), content, lease }) }
    }
}

impl Buffer for XlaBuffer {
    fn len(&self) -> usize {
        self.storage.len
    }

    fn dtype(&self) -> DType {
        self.storage.dtype
    }

    fn is_exclusive(&self) -> bool {
        Arc::strong_count(&self.storage) == 1
    }
}
