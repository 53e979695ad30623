//! Buffers: handles to storage, and its contents.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use fsdp_core::DType;
use fsdp_core::memory::{Buffer, Category};
use fsdp_nn::HostBuffer;
use fsdp_nn::accounting::{Account, Lease};

use crate::ffi::DeviceBuffer;
use crate::hlo::{Shape, Value};

/// The contents of a storage.
pub(crate) enum Content {
    /// Undefined; must not be read.
    Undefined,
    /// Zeros; no memory is allocated before they are read.
    Zero,
    /// Elements on the host; uploaded when a program reads them.
    Host(HostBuffer),
    /// Elements on the device, and a host copy if they have been read.
    Device(Arc<DeviceBuffer>, Option<HostBuffer>),
    /// Values of the program being traced, keyed by the offset of their first element. Gaps between them are undefined.
    Traced(BTreeMap<usize, Value>),
}

/// Storage of `len` elements.
pub(crate) struct Storage {
    pub(crate) dtype: DType,
    pub(crate) len: usize,
    /// Length in programs, if longer than `len`.
    room: OnceLock<usize>,
    content: Mutex<Content>,
    /// Accounts for the storage while it lives.
    lease: Arc<Lease>,
}

impl Storage {
    /// Locks the contents. A rank is one thread, so there is no contention.
    pub(crate) fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the contents and leaves the storage undefined.
    pub(crate) fn take(&self) -> Content {
        std::mem::replace(&mut *self.content(), Content::Undefined)
    }

    pub(crate) fn put(&self, content: Content) {
        *self.content() = content;
    }

    pub(crate) fn category(&self) -> Category {
        self.lease.category()
    }

    /// Length in programs, the same on all ranks; elements past `len` are padding that is never read.
    pub(crate) fn room(&self) -> usize {
        self.room.get().copied().unwrap_or(self.len)
    }

    /// Whether [`Storage::widen`] was called.
    pub(crate) fn is_widened(&self) -> bool {
        self.room.get().is_some()
    }

    /// Sets the length in programs; called before a program uses the storage.
    pub(crate) fn widen(&self, room: usize) {
        assert!(room >= self.len, "{} elements have no room in {room}", self.len);
        assert_eq!(*self.room.get_or_init(|| room), room, "storage is as long in all programs");
    }

    /// The shape in programs: a vector.
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
