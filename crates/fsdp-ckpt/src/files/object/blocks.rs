//! Reads objects by ranged requests of whole blocks and caches the most recently used blocks.
//!
//! Format readers often read a few bytes (headers, pickles, directories of archives) or many bytes in order. So short
//! reads use small blocks and long reads large ones. All files of a store share the cache.

use std::{
    collections::VecDeque,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use object_store::{Error, GetOptions, ObjectMeta, ObjectStore, ObjectStoreExt, path::Path as Key};

use super::{
    Inner,
    fault::{changed, failed},
    patience::{GivenUp, Patience},
    runtime::wait,
};
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
    inner: Arc<Inner>,
    opened: ObjectMeta,
    version: Mutex<Version>,
}

/// The version of an object that is read.
#[derive(Debug)]
struct Version {
    e_tag: Option<String>,
    /// Whether bytes of it have been read. Until then, only one answer has named it, which may have been wrong.
    is_certain: bool,
}

impl ObjectReader {
    pub(super) fn new(inner: Arc<Inner>, opened: ObjectMeta) -> ObjectReader {
        let version = Mutex::new(Version { e_tag: opened.e_tag.clone(), is_certain: false });
        ObjectReader { inner, opened, version }
    }

    fn version(&self) -> MutexGuard<'_, Version> {
        // Every change under the lock is complete before anything can panic.
        self.version.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn e_tag(&self) -> Option<String> {
        self.version().e_tag.clone()
    }

    fn fetch(&self, start: u64, end: u64) -> io::Result<Vec<u8>> {
        let (began, mut attempts) = (Instant::now(), 0);
        loop {
            let options = GetOptions {
                range: Some((start..end).into()),
                if_match: self.e_tag(),
                ..GetOptions::default()
            };
            let found = wait(async {
                let found = self.inner.store.get_opts(&self.opened.location, options).await?;
                Ok((found.meta.size, found.bytes().await?))
            });
            attempts += 1;
            let last = match found {
                Ok((len, bytes)) if len == self.opened.size && bytes.len() as u64 == end - start => {
                    self.version().is_certain = true;
                    return Ok(bytes.into());
                }
                Ok(_) => return Err(self.changed(self.head())),
                Err(last @ Error::Precondition { .. }) => last,
                Err(error) => return Err(failed(error)),
            };
            let now = self.head();
            if !now.as_ref().is_some_and(|now| self.is_misnamed(now)) {
                return Err(self.changed(now));
            }
            if attempts > Patience::USUAL.retries {
                let given_up = GivenUp { attempts, elapsed: began.elapsed(), last };
                return Err(failed(Error::Generic { store: "object store", source: Box::new(given_up) }));
            }
        }
    }

    fn head(&self) -> Option<ObjectMeta> {
        wait(self.inner.store.head(&self.opened.location)).ok()
    }

    /// Whether the object is the one that was opened although it does not have the version that was named then. If so,
    /// corrects the version.
    fn is_misnamed(&self, now: &ObjectMeta) -> bool {
        let mut version = self.version();
        let is_same = now.size == self.opened.size && now.last_modified == self.opened.last_modified;
        if version.is_certain || !is_same {
            return false;
        }
        version.e_tag.clone_from(&now.e_tag);
        true
    }

    /// The error for an object that is not the one that was opened.
    fn changed(&self, now: Option<ObjectMeta>) -> io::Error {
        let now = now.as_ref().map(|found| (found.e_tag.as_deref(), found.size));
        changed((self.e_tag().as_deref(), self.opened.size), now)
    }
}

impl OpenFile for ObjectReader {
    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<usize> {
        if out.is_empty() || offset >= self.opened.size {
            return Ok(0);
        }
        let size = if out.len() < LONG_READ { SMALL } else { LARGE };
        let start = offset - offset % size.0;
        let place = BlockId { key: self.opened.location.clone(), e_tag: self.e_tag(), start };
        let block = self.inner.blocks.block(place, size);
        let mut block = block.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = match &mut *block {
            Some(bytes) => {
                self.version().is_certain = true;
                bytes
            }
            empty => empty.insert(self.fetch(start, self.opened.size.min(start + size.0))?),
        };
        let there = &bytes[(offset - start) as usize..];
        let count = there.len().min(out.len());
        out[..count].copy_from_slice(&there[..count]);
        Ok(count)
    }

    fn metadata(&self) -> io::Result<Metadata> {
        Ok(Metadata { kind: FileKind::File, len: self.opened.size, id: (0, 0) })
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}
