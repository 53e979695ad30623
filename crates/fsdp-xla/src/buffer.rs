//! Buffers: handles to storage, and its contents.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use fsdp_core::DType;
use fsdp_core::memory::{Buffer, Category};
use fsdp_nn::HostBuffer;
use fsdp_nn::accounting::{Account, Lease};

use crate::error::XlaError;
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
    /// An element of a stack on the device.
    Element(Arc<DeviceStack>, usize),
    /// Values of the program being traced, keyed by the offset of their first element. Gaps between them are undefined.
    Traced(BTreeMap<usize, Value>),
}

/// The source of an argument's elements.
pub(crate) enum Source {
    /// A host buffer.
    Host(HostBuffer),
    /// Host bytes: numbers of this step.
    Bytes(Vec<u8>),
    /// Zeros.
    Zero,
    /// A device buffer.
    Device(Arc<DeviceBuffer>),
    /// An element of a stack on the device.
    Element(Arc<DeviceStack>, usize),
}

/// The contents of several storages of equal shape, one after the other in a device buffer: those of equal layers, which
/// loops of a program read and write.
pub(crate) struct DeviceStack {
    pub(crate) buffer: Arc<DeviceBuffer>,
    pub(crate) count: usize,
    /// The shape of the whole.
    shape: Shape,
    /// A host copy, if an element has been read.
    host: OnceLock<Vec<u8>>,
}

impl DeviceStack {
    pub(crate) fn new(buffer: Arc<DeviceBuffer>, shape: &Shape, count: usize) -> Self {
        Self { buffer, count, shape: shape.clone(), host: OnceLock::new() }
    }

    /// Whether it has this shape, and these are its elements, in order.
    pub(crate) fn consists_of(self: &Arc<Self>, shape: &Shape, sources: &[Source]) -> bool {
        let is_element = |(place, source): (usize, &Source)| match source {
            Source::Element(stack, index) => Arc::ptr_eq(stack, self) && *index == place,
            _ => false,
        };
        self.shape == *shape && sources.len() == self.count && sources.iter().enumerate().all(is_element)
    }

    /// The bytes of an element.
    ///
    /// # Errors
    /// Those of the plugin.
    pub(crate) fn element(&self, index: usize) -> Result<&[u8], XlaError> {
        let contents = match self.host.get() {
            Some(contents) => contents,
            None => {
                let mut bytes = vec![0; self.shape.byte_len()];
                self.buffer.download(&mut bytes)?;
                self.host.get_or_init(|| bytes)
            }
        };
        let len = self.shape.byte_len() / self.count;
        Ok(&contents[index * len..][..len])
    }
}

/// Storage of `len` elements.
pub(crate) struct Storage {
    pub(crate) dtype: DType,
    pub(crate) len: usize,
    /// Length in programs, if longer than `len`.
    padded_len: OnceLock<usize>,
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
    pub(crate) fn padded_len(&self) -> usize {
        self.padded_len.get().copied().unwrap_or(self.len)
    }

    /// Whether [`Storage::widen`] was called.
    pub(crate) fn is_widened(&self) -> bool {
        self.padded_len.get().is_some()
    }

    /// Sets the length in programs; called before a program uses the storage.
    pub(crate) fn widen(&self, padded_len: usize) {
        assert!(padded_len >= self.len, "{} elements have no room in {padded_len}", self.len);
        assert_eq!(
            *self.padded_len.get_or_init(|| padded_len),
            padded_len,
            "storage is as long in all programs"
        );
    }

    /// The shape in programs: a vector.
    pub(crate) fn shape(&self) -> Shape {
        Shape::new(&[self.padded_len()], self.dtype.into())
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
        Self { storage: Arc::new(Storage { dtype, len, padded_len: OnceLock::new(), content, lease }) }
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
