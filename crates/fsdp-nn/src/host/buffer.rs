//! Handles of host storage.
//!
//! A handle consists of an entry in the rank's account ([`Lease`]) and, once something was written, storage. Both are
//! reference counted: a handle whose lease or storage has other owners is shared and cannot be written.

use std::sync::Arc;

use fsdp_core::memory::{Buffer, Slice};
use fsdp_core::{DType, Error};

use super::element::{Scalar, for_scalar};
use super::pool::{HostPool, Storage};
use crate::accounting::Lease;
use crate::lengths;

/// A buffer of a [`HostMemory`](super::HostMemory).
#[derive(Clone, Debug)]
pub struct HostBuffer {
    lease: Arc<Lease>,
    source: Source,
    storage: Option<Arc<Block>>,
    /// Storage retained when the contents were released.
    spare: Option<Arc<Block>>,
    dtype: DType,
    len: usize,
}

/// The origin of a buffer's storage.
#[derive(Clone, Debug)]
pub(super) struct Source {
    pub(super) pool: Arc<HostPool>,
    /// Whether to poison storage when it is allocated and when it is released.
    pub(super) poison: bool,
    /// Whether a buffer retains its storage when its contents are released.
    pub(super) resident: bool,
}

/// Storage with a dtype. It is filled with poison before it returns to the pool, if `poison` is set.
#[derive(Debug)]
struct Block {
    storage: Storage,
    dtype: DType,
    poison: bool,
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.poison {
            poison(&mut self.storage, self.dtype);
        }
    }
}

fn poison(storage: &mut Storage, dtype: DType) {
    for_scalar!(dtype, E => storage.elements_mut::<E>().fill(E::POISON));
}

impl HostBuffer {
    /// Creates a handle without storage.
    pub(super) fn new(lease: Arc<Lease>, source: Source, dtype: DType, len: usize) -> Self {
        Self { lease, source, storage: None, spare: None, dtype, len }
    }

    /// Returns the elements of a range.
    pub(super) fn elements<T: Scalar>(slice: Slice<'_, Self>) -> Result<&[T], Error> {
        let buffer = slice.buffer;
        buffer.expect_dtype::<T>()?;
        if slice.len == 0 {
            return Ok(&[]);
        }
        let block =
            buffer.storage.as_ref().ok_or(Error::Released { len: buffer.len, dtype: buffer.dtype })?;
        Ok(&block.storage.elements()[slice.offset..slice.offset + slice.len])
    }

    /// Returns all elements, writable; takes storage from the buffer's own pool if it has none.
    pub(super) fn elements_mut<T: Scalar>(&mut self) -> Result<&mut [T], Error> {
        self.expect_dtype::<T>()?;
        let readers = self.other_handles();
        let (dtype, len) = (self.dtype, self.len);
        if readers > 0 {
            return Err(Error::Shared { len, dtype, readers });
        }
        let block = match self.storage.take().or_else(|| self.spare.take()) {
            Some(block) => block,
            None => self.take_storage()?,
        };
        let block =
            Arc::get_mut(self.storage.insert(block)).ok_or(Error::Shared { len, dtype, readers: 1 })?;
        Ok(&mut block.storage.elements_mut()[..len])
    }

    /// Takes storage in advance if the buffer is resident. Otherwise it might later get storage that only happens to
    /// be free, and another buffer would have to allocate.
    pub(super) fn reserve(&mut self) -> Result<(), Error> {
        if self.source.resident && self.len > 0 {
            self.spare = Some(self.take_storage()?);
        }
        Ok(())
    }

    fn take_storage(&self) -> Result<Arc<Block>, Error> {
        let Source { pool, poison: poisons, .. } = &self.source;
        let (mut storage, is_new) = pool.take(self.lease.category(), self.len * self.dtype.size_bytes())?;
        if is_new {
            self.lease.count_allocation();
            if *poisons {
                poison(&mut storage, self.dtype);
            }
        }
        Ok(Arc::new(Block { storage, dtype: self.dtype, poison: *poisons }))
    }

    /// Releases the contents, and the storage too unless it is retained and has no other reader.
    pub(super) fn release(&mut self) {
        let Some(mut block) = self.storage.take() else { return };
        if !self.source.resident {
            return;
        }
        if let Some(unshared) = Arc::get_mut(&mut block) {
            if unshared.poison {
                poison(&mut unshared.storage, unshared.dtype);
            }
            self.spare = Some(block);
        }
    }

    /// Shares the storage of `other`; returns whether `other` has storage.
    pub(super) fn share(&mut self, other: &Self) -> bool {
        if other.storage.is_some() {
            self.storage.clone_from(&other.storage);
        }
        other.storage.is_some()
    }

    fn other_handles(&self) -> usize {
        let of_storage = self.storage.as_ref().map_or(1, Arc::strong_count);
        Arc::strong_count(&self.lease).max(of_storage) - 1
    }

    fn expect_dtype<T: Scalar>(&self) -> Result<(), Error> {
        if self.dtype == T::DTYPE {
            Ok(())
        } else {
            lengths::wrong_dtype(self.lease.category(), T::DTYPE, self.dtype)
        }
    }
}

impl Buffer for HostBuffer {
    fn len(&self) -> usize {
        self.len
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn is_exclusive(&self) -> bool {
        Arc::strong_count(&self.lease) == 1
    }
}
