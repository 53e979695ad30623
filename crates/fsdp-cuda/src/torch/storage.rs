//! What libtorch needs to know of a memory.

use std::ops::Deref;

use fsdp_core::memory::{Memory, Slice, SliceMut};
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::backend::{AttentionDims, Dropout, HeadChunks};

use crate::fused::FusedOps;

/// Keeps implementations within this crate: views trust the addresses.
pub(super) mod sealed {
    /// A storage of this crate.
    pub trait Sealed {}
}

/// A memory whose buffers libtorch can look at.
///
/// An address points to the elements of the range, contiguous, for as long as the range is borrowed.
pub trait TorchStorage: Memory + sealed::Sealed {
    /// Where buffers lie.
    fn device(&self) -> tch::Device;

    /// Where the elements of a range begin, for work of a queue.
    ///
    /// # Errors
    /// [`Error::Released`] when the buffer has no contents.
    fn address(&self, queue: Queue, slice: Slice<'_, Self::Buffer>) -> Result<*const u8, Error>;

    /// As [`TorchStorage::address`], to be written; the buffer takes storage if it has none.
    ///
    /// # Errors
    /// [`Error::Shared`] when the storage has other handles.
    fn address_mut(&self, queue: Queue, slice: SliceMut<'_, Self::Buffer>) -> Result<*mut u8, Error>;

    /// Makes a queue what libtorch's operations of this thread are enqueued on.
    ///
    /// # Errors
    /// [`Error::Device`] when the device has failed.
    fn enter(&self, queue: Queue) -> Result<(), Error>;

    /// Whether a buffer lies where libtorch computes: [`TorchStorage::device`].
    fn is_on_device(&self, _buffer: &Self::Buffer) -> bool {
        true
    }

    /// Our kernels for this memory.
    fn fused(&self) -> Option<Fused<'_, Self::Buffer>>;

    /// How many rows of logits the head makes at once: what is best on processors, unless the memory knows better.
    fn head_chunks(&self) -> HeadChunks {
        HeadChunks::Small
    }

    /// The factors of dropout for runs of `run_len` elements, side by side, where a kernel of ours makes them: run `i` has
    /// the elements from `firsts[i]` of the sample whose key is `runs.keys[i]`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    fn dropout_factors(
        &self,
        _runs: Dropout<'_>,
        _firsts: &[u64],
        _dtype: DType,
        _run_len: usize,
    ) -> Result<Option<Self::Buffer>, Error> {
        Ok(None)
    }

    /// Our attention for this memory; libtorch's where there is none.
    fn attention(&self) -> Option<Box<dyn AttentionOps<Self::Buffer> + '_>> {
        None
    }
}

/// Our kernels for a memory.
pub enum Fused<'a, B> {
    /// The memory has them itself.
    Own(&'a dyn FusedOps<B>),
    /// Something made of the memory has them.
    Made(Box<dyn FusedOps<B> + 'a>),
}

impl<'a, B: 'a> Deref for Fused<'a, B> {
    type Target = dyn FusedOps<B> + 'a;

    fn deref(&self) -> &(dyn FusedOps<B> + 'a) {
        match self {
            Fused::Own(fused) => *fused,
            Fused::Made(fused) => &**fused,
        }
    }
}

/// Attention by kernels of ours.
pub trait AttentionOps<B> {
    /// As [`Backend::attention`](fsdp_nn::Backend::attention).
    ///
    /// # Errors
    /// Those of the memory.
    fn attention(
        &self,
        dims: AttentionDims,
        dropout: Option<Dropout<'_>>,
        qkv: Slice<'_, B>,
        y: SliceMut<'_, B>,
        lse: SliceMut<'_, B>,
    ) -> Result<(), Error>;

    /// As [`Backend::attention_backward`](fsdp_nn::Backend::attention_backward).
    ///
    /// # Errors
    /// Those of the memory.
    fn attention_backward(
        &self,
        dims: AttentionDims,
        dropout: Option<Dropout<'_>>,
        qkv: Slice<'_, B>,
        y: Slice<'_, B>,
        lse: Slice<'_, B>,
        dy: Slice<'_, B>,
        dqkv: SliceMut<'_, B>,
    ) -> Result<(), Error>;
}
