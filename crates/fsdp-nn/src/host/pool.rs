//! Storage of buffers and scratch, kept for reuse and shared by all ranks of a world.
//!
//! Storage is allocated in whole cache lines, so that every buffer is aligned for the widest vectors, and any dtype
//! can reuse a block of the same size. Free blocks are looked up by exact size: training requests the same sizes in
//! every step, so nothing is allocated after the first. [`Scratch`] is temporary storage of a kernel call; no rank
//! counts it, and its total is the maximum ever in use at once.

use std::alloc::{Layout, handle_alloc_error};
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::allocation::try_zeroed_vec;
use bytemuck::{Pod, Zeroable};
use fsdp_core::memory::Category;
use fsdp_core::out_of_memory::Size;
use fsdp_core::{Error, MemoryKind, OutOfMemory};

/// An alternative source of storage to the allocator: host memory that a device can copy from and to.
pub trait HostBlocks: Send + Sync + fmt::Debug {
    /// Allocates a block of at least `bytes` bytes of unspecified contents, aligned to 64, for a buffer of a
    /// category.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if memory is exhausted.
    fn allocate(&self, category: Category, bytes: usize) -> Result<Box<dyn HostBlock>, Error>;
}

/// A block of host memory that is freed when it is dropped.
pub trait HostBlock: Send + Sync + fmt::Debug {
    /// Returns the whole block.
    fn bytes(&self) -> &[u8];

    /// Returns the whole block, writable.
    fn bytes_mut(&mut self) -> &mut [u8];
}

/// 64 bytes, aligned.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
pub(super) struct Line([u8; 64]);

/// The free storage of a world of ranks.
#[derive(Debug, Default)]
pub struct HostPool {
    blocks: Mutex<BTreeMap<usize, Vec<Vec<Line>>>>,
    scratch: Mutex<Vec<Vec<Line>>>,
    /// Lines of buffer storage, in use or free.
    held_lines: AtomicUsize,
    /// The source of buffer storage; `None` for the allocator.
    source: Option<Arc<dyn HostBlocks>>,
}

impl HostPool {
    /// Creates an empty pool.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Creates an empty pool whose buffers use blocks of `source`. Freed blocks are not kept for reuse, because a
    /// device may still copy from them; `source` decides when to reuse them.
    pub fn of_blocks(source: Arc<dyn HostBlocks>) -> Arc<Self> {
        Arc::new(Self { source: Some(source), ..Self::default() })
    }

    /// Returns unused storage to the allocator.
    pub fn trim(&self) {
        let free = std::mem::take(&mut *self.blocks.lock().unwrap_or_else(PoisonError::into_inner));
        let trimmed_lines: usize = free.iter().map(|(line_count, blocks)| line_count * blocks.len()).sum();
        self.held_lines.fetch_sub(trimmed_lines, Ordering::Relaxed);
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Bytes of all buffer storage that was allocated and not trimmed: the actual memory of the process, whereas
    /// per-rank accounting is logical.
    pub fn held_bytes(&self) -> usize {
        self.held_lines.load(Ordering::Relaxed) * size_of::<Line>()
    }

    /// Returns storage for `bytes` bytes of unspecified contents, and whether it is newly allocated.
    pub(super) fn take(self: &Arc<Self>, category: Category, bytes: usize) -> Result<(Storage, bool), Error> {
        if let Some(source) = &self.source {
            return Ok((Storage::Foreign(source.allocate(category, bytes)?), true));
        }
        let line_count = bytes.div_ceil(size_of::<Line>());
        let reused = self
            .blocks
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_mut(&line_count)
            .and_then(Vec::pop);
        let is_new = reused.is_none();
        let lines = match reused {
            Some(lines) => lines,
            None => try_zeroed_vec(line_count).map_err(|()| self.full(category, bytes))?,
        };
        if is_new {
            self.held_lines.fetch_add(line_count, Ordering::Relaxed);
        }
        Ok((Storage::Own(PooledLines { lines, pool: Arc::clone(self) }), is_new))
    }

    fn full(&self, category: Category, bytes: usize) -> Error {
        let in_use = format!("the buffers of this process hold {}", Size(self.held_bytes()));
        OutOfMemory { kind: MemoryKind::Host, category, bytes: Some(bytes), in_use }.into()
    }

    /// Returns `len` elements of unspecified contents for the duration of a kernel.
    ///
    /// If memory is exhausted, this ends the process as any small allocation does: a kernel cannot fail, and its scratch is
    /// small compared to its operands.
    pub(crate) fn scratch<A: Pod>(self: &Arc<Self>, len: usize) -> Scratch<A> {
        let line_count = (len * size_of::<A>()).div_ceil(size_of::<Line>());
        let mut free = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let fitting = free.iter().rposition(|lines| lines.len() >= line_count);
        let reused = fitting.map(|index| free.swap_remove(index)).or_else(|| free.pop());
        drop(free);
        // A block that is too small is replaced, not grown, which would copy it.
        let lines =
            reused.filter(|lines| lines.len() >= line_count).unwrap_or_else(|| {
                match try_zeroed_vec(line_count) {
                    Ok(lines) => lines,
                    Err(()) => {
                        handle_alloc_error(Layout::array::<Line>(line_count).unwrap_or(Layout::new::<Line>()))
                    }
                }
            });
        Scratch { lines, len, pool: Arc::clone(self), element: PhantomData }
    }
}

/// A block of storage; dropping it returns it to its origin.
#[derive(Debug)]
pub(super) enum Storage {
    Own(PooledLines),
    Foreign(Box<dyn HostBlock>),
}

impl Storage {
    /// Returns the whole block as elements.
    pub(super) fn elements<T: Pod>(&self) -> &[T] {
        match self {
            Storage::Own(own) => bytemuck::cast_slice(&own.lines),
            Storage::Foreign(block) => whole_elements(block.bytes()),
        }
    }

    /// Returns the whole block as writable elements.
    pub(super) fn elements_mut<T: Pod>(&mut self) -> &mut [T] {
        match self {
            Storage::Own(own) => bytemuck::cast_slice_mut(&mut own.lines),
            Storage::Foreign(block) => {
                let bytes = block.bytes_mut();
                let len = bytes.len() / size_of::<T>() * size_of::<T>();
                bytemuck::cast_slice_mut(&mut bytes[..len])
            }
        }
    }
}

fn whole_elements<T: Pod>(bytes: &[u8]) -> &[T] {
    bytemuck::cast_slice(&bytes[..bytes.len() / size_of::<T>() * size_of::<T>()])
}

/// Lines that return to a pool when dropped.
#[derive(Debug)]
pub(super) struct PooledLines {
    lines: Vec<Line>,
    pool: Arc<HostPool>,
}

impl Drop for PooledLines {
    fn drop(&mut self) {
        let lines = std::mem::take(&mut self.lines);
        let mut blocks = self.pool.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        blocks.entry(lines.len()).or_default().push(lines);
    }
}

/// Temporary elements of a kernel.
#[derive(Debug)]
pub(crate) struct Scratch<A> {
    lines: Vec<Line>,
    len: usize,
    pool: Arc<HostPool>,
    element: PhantomData<A>,
}

impl<A: Pod> Deref for Scratch<A> {
    type Target = [A];

    fn deref(&self) -> &[A] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }
}

impl<A: Pod> DerefMut for Scratch<A> {
    fn deref_mut(&mut self) -> &mut [A] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len]
    }
}

impl<A> Drop for Scratch<A> {
    fn drop(&mut self) {
        let lines = std::mem::take(&mut self.lines);
        self.pool.scratch.lock().unwrap_or_else(PoisonError::into_inner).push(lines);
    }
}
