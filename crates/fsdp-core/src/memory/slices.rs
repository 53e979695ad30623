//! Buffer handles and ranges of buffers.

use crate::dtype::DType;

/// Properties of a buffer handle.
pub trait Buffer: Clone + Send + Sync + 'static {
    /// Number of elements.
    fn len(&self) -> usize;

    /// Whether there are no elements.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Type of the elements.
    fn dtype(&self) -> DType;

    /// Whether this handle is the only one of its buffer. (Other buffers may still read the same storage through
    /// [`Memory::alias`](super::Memory::alias), and it cannot be written then.)
    fn is_exclusive(&self) -> bool;
}

#[track_caller]
fn check_range(buffer: &impl Buffer, offset: usize, len: usize) {
    assert!(offset + len <= buffer.len(), "range {offset}..{} of a buffer of {}", offset + len, buffer.len());
}

/// A readable range of a buffer, in elements.
#[derive(Debug)]
pub struct Slice<'a, B> {
    /// The buffer.
    pub buffer: &'a B,
    /// First element.
    pub offset: usize,
    /// Number of elements.
    pub len: usize,
}

impl<B> Clone for Slice<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B> Copy for Slice<'_, B> {}

impl<'a, B: Buffer> Slice<'a, B> {
    /// The range `offset .. offset + len` of `buffer`.
    ///
    /// # Panics
    /// When the range is not within the buffer.
    pub fn new(buffer: &'a B, offset: usize, len: usize) -> Self {
        check_range(buffer, offset, len);
        Self { buffer, offset, len }
    }

    /// The whole buffer.
    pub fn whole(buffer: &'a B) -> Self {
        Self { buffer, offset: 0, len: buffer.len() }
    }

    /// The range `offset .. offset + len` of this one.
    ///
    /// # Panics
    /// When the range is not within the buffer.
    pub fn part(self, offset: usize, len: usize) -> Self {
        Self::new(self.buffer, self.offset + offset, len)
    }
}

/// A writable range of a buffer, in elements.
#[derive(Debug)]
pub struct SliceMut<'a, B> {
    /// The buffer.
    pub buffer: &'a mut B,
    /// First element.
    pub offset: usize,
    /// Number of elements.
    pub len: usize,
}

impl<'a, B: Buffer> SliceMut<'a, B> {
    /// The range `offset .. offset + len` of `buffer`.
    ///
    /// # Panics
    /// When the range is not within the buffer.
    pub fn new(buffer: &'a mut B, offset: usize, len: usize) -> Self {
        check_range(buffer, offset, len);
        Self { buffer, offset, len }
    }

    /// The whole buffer.
    pub fn whole(buffer: &'a mut B) -> Self {
        let len = buffer.len();
        Self { buffer, offset: 0, len }
    }

    /// Reborrows the range for a shorter lifetime.
    pub fn reborrow(&mut self) -> SliceMut<'_, B> {
        SliceMut { buffer: self.buffer, offset: self.offset, len: self.len }
    }

    /// The same range, readable.
    pub fn as_slice(&self) -> Slice<'_, B> {
        Slice { buffer: self.buffer, offset: self.offset, len: self.len }
    }
}

/// A readable range that keeps its buffer alive: the form in which a block receives a parameter.
#[derive(Clone, Debug)]
pub struct View<B> {
    /// A shared handle.
    pub buffer: B,
    /// First element.
    pub offset: usize,
    /// Number of elements.
    pub len: usize,
}

impl<B: Buffer> View<B> {
    /// The range as a borrowed slice.
    pub fn slice(&self) -> Slice<'_, B> {
        Slice::new(&self.buffer, self.offset, self.len)
    }
}

/// Elements on the host, to be copied into a buffer.
#[derive(Clone, Copy, Debug)]
pub enum HostSlice<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// Double precision.
    F64(&'a [f64]),
    /// Bytes.
    U8(&'a [u8]),
    /// Unsigned 32-bit integers, such as token ids.
    U32(&'a [u32]),
    /// Signed 64-bit integers.
    I64(&'a [i64]),
}

/// Host memory that elements of a buffer are copied to.
#[derive(Debug)]
pub enum HostSliceMut<'a> {
    /// Single precision.
    F32(&'a mut [f32]),
    /// Double precision.
    F64(&'a mut [f64]),
    /// Bytes.
    U8(&'a mut [u8]),
    /// Unsigned 32-bit integers.
    U32(&'a mut [u32]),
    /// Signed 64-bit integers.
    I64(&'a mut [i64]),
}
