//! Reads objects by ranged requests of whole blocks and caches the most recently used blocks.
//!
//! Format readers often read a few bytes (headers, pickles, directories of archives) or many bytes in order. So short
//! reads use small blocks and long reads large ones. All files of a store share the cache.

use std::{
    collections::VecDeque,
    io,
    sync::{Arc, Mutex, PoisonError},
};

use object_store::{Error, GetOptions, ObjectStore, ObjectStoreExt, path::Path as Key};

use super::{Inner, changed, failed, stores::wait};
use crate::files::{FileKind, Metadata, OpenFile};

/// Length in bytes from which reads use large blocks.
const LONG_READ: usize = 64 << 10;

/// Bytes of a small block, and number of cached ones: 16 MiB in total.
const SMALL: (u64, usize) = (256 << 10, 64);

/// Bytes of a large block, and number of cached ones: 128 MiB in total. A request of this size hides its latency.
const LARGE: (u64, usize) = (4 << 20, 32);

/// The most recently used blocks.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    small: Mutex<VecDeque<(BlockId, Arc<Block>)>>,
    large: Mutex<VecDeque<(BlockId, Arc<Block>)>>,
}

/// Identifies a block of one version of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
struct BlockId {
    key: Key,
    e_tag: Option<String>,
    start: u64,
}

/// The bytes of a block; `None` until the first reader has fetched them.
type Block = Mutex<Option<Vec<u8>>>;

impl Blocks {
    fn block(&self, place: BlockId, size: (u64, usize)) -> Arc<Block> {
        let blocks = if size == LARGE { &self.large } else { &self.small };
        // Every change under the lock is complete before anything can panic.
        let mut blocks = blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let found = blocks.iter().rposition(|(other, _)| *other == place).and_then(|at| blocks.remove(at));
        let block = found.map_or_else(Arc::default, |(_, block)| block);
        if blocks.len() == size.1 {
            blocks.pop_front();
        }
        blocks.push_back((place, Arc::clone(&block)));
        block
    }
}

/// An object as it was when it was opened. Reading fails if the object has changed since.
#[derive(Debug)]
pub(super) struct ObjectReader {
    pub(super) inner: Arc<Inner>,
    pub(super) key: Key,
    pub(super) len: u64,
    pub(super) e_tag: Option<String>,
}

impl ObjectReader {
    fn fetch(&self, start: u64, end: u64) -> io::Result<Vec<u8>> {
        let options = GetOptions {
            range: Some((start..end).into()),
            if_match: self.e_tag.clone(),
            ..GetOptions::default()
        };
        let found = wait(async {
            let found = self.inner.store.get_opts(&self.key, options).await?;
            Ok((found.meta.size, found.bytes().await?))
        });
        match found {
            Ok((len, bytes)) if len == self.len && bytes.len() as u64 == end - start => Ok(bytes.into()),
            Ok(_) | Err(Error::Precondition { .. }) => Err(self.changed()),
            Err(error) => Err(failed(error)),
        }
    }

    /// The error for an object that is not the one that was opened.
    fn changed(&self) -> io::Error {
        let now = wait(self.inner.store.head(&self.key)).ok();
        let now = now.as_ref().map(|found| (found.e_tag.as_deref(), found.size));
        changed((self.e_tag.as_deref(), self.len), now)
    }
}

impl OpenFile for ObjectReader {
    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<usize> {
        if out.is_empty() || offset >= self.len {
            return Ok(0);
        }
        let size = if out.len() < LONG_READ { SMALL } else { LARGE };
        let start = offset - offset % size.0;
        let place = BlockId { key: self.key.clone(), e_tag: self.e_tag.clone(), start };
        let block = self.inner.blocks.block(place, size);
        let mut block = block.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = match &mut *block {
            Some(bytes) => bytes,
            empty => empty.insert(self.fetch(start, self.len.min(start + size.0))?),
        };
        let there = &bytes[(offset - start) as usize..];
        let count = there.len().min(out.len());
        out[..count].copy_from_slice(&there[..count]);
        Ok(count)
    }

    fn metadata(&self) -> io::Result<Metadata> {
        Ok(Metadata { kind: FileKind::File, len: self.len, id: (0, 0) })
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}
