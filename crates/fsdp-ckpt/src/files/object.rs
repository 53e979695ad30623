//! Object stores as file systems: S3, Google Cloud Storage, Azure, and two for tests (`memory:`, `file:`).
//!
//! | file system | object store |
//! | --- | --- |
//! | positioned reads | ranged requests of whole blocks, with a cache ([`blocks`]) |
//! | positioned writes | parts, collected in memory or on disk and uploaded in order ([`upload`]) |
//! | visibility during writing | none: an object appears as a whole when its file is synced |
//! | exclusive creation | a condition on the upload of a small file |
//! | directories | common prefixes of names; an empty directory does not exist |
//! | renaming, locks, free space | none |
//!
//! Calls block on one small shared runtime. Requests that fail on the network or with a server error are repeated with
//! growing pauses ([`patient`]).

mod blocks;
mod checked;
mod fault;
mod parts;
mod patience;
mod patient;
mod runtime;
mod stores;
mod upload;

use std::{
    collections::BTreeMap,
    ffi::OsString,
    io,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt, path::Path as Key};

use blocks::{Blocks, ObjectReader};
use fault::{StoreFault, failed};
use parts::Limits;
use runtime::wait;
pub(crate) use stores::at;
use upload::{Upload, UploadFile};

use super::{Access, FileKind, FileSystem, Metadata, OpenFile, url};
use crate::digest::DigestKind;

/// An object store; clones share it.
#[derive(Clone, Debug)]
pub(crate) struct ObjectFiles(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    store: Arc<dyn ObjectStore>,
    limits: Limits,
    blocks: Blocks,
    /// Uploads in progress.
    uploads: Mutex<BTreeMap<Key, Arc<Upload>>>,
}

impl ObjectFiles {
    fn new(store: Arc<dyn ObjectStore>, limits: Limits) -> ObjectFiles {
        ObjectFiles(Arc::new(Inner { store, limits, blocks: Blocks::default(), uploads: Mutex::default() }))
    }

    fn uploads(&self) -> MutexGuard<'_, BTreeMap<Key, Arc<Upload>>> {
        // Every change under the lock is complete before anything can panic.
        self.0.uploads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read(&self, key: Key) -> io::Result<Box<dyn OpenFile>> {
        let found = wait(self.0.store.head(&key)).map_err(failed)?;
        Ok(Box::new(ObjectReader::new(Arc::clone(&self.0), found)))
    }

    fn write(&self, key: Key, access: Access) -> io::Result<Box<dyn OpenFile>> {
        let mut uploads = self.uploads();
        let upload = match (uploads.get(&key), access) {
            (Some(_), Access::CreateNew) => return Err(io::ErrorKind::AlreadyExists.into()),
            (Some(upload), _) => Arc::clone(upload),
            // Completed objects are never changed.
            (None, Access::Write) => return Err(io::ErrorKind::NotFound.into()),
            (None, _) => {
                let upload = Upload::new(
                    Arc::clone(&self.0.store),
                    key.clone(),
                    access == Access::CreateNew,
                    self.0.limits,
                );
                Arc::clone(uploads.entry(key.clone()).or_insert(Arc::new(upload)))
            }
        };
        Ok(Box::new(UploadFile { files: self.clone(), key, upload }))
    }

    /// Forgets an upload that has ended.
    fn forget(&self, key: &Key) {
        self.uploads().remove(key);
    }
}

/// Parses the name of an object. URLs are taken literally; nothing in them is decoded.
fn key(path: &Path) -> io::Result<Key> {
    let (_, _, names) = url::split(path).ok_or(io::ErrorKind::InvalidInput)?;
    let names: Vec<&str> = names.split('/').filter(|name| !name.is_empty()).collect();
    Key::parse(names.join("/")).map_err(|fault| failed(fault.into()))
}

/// A number that identifies the version of an object.
fn version(found: &ObjectMeta) -> u64 {
    let tag = found.e_tag.clone().unwrap_or_else(|| found.last_modified.to_rfc3339());
    DigestKind::Crc64.of(format!("{tag} {}", found.size).as_bytes()).value
}

impl FileSystem for ObjectFiles {
    fn renames(&self) -> bool {
        false
    }

    fn open(&self, path: &Path, access: Access) -> io::Result<Box<dyn OpenFile>> {
        let key = key(path)?;
        match access {
            Access::Read => self.read(key),
            Access::Write | Access::CreateOrWrite | Access::CreateNew => self.write(key, access),
        }
    }

    fn metadata(&self, path: &Path) -> io::Result<Metadata> {
        let key = key(path)?;
        let directory = Metadata { kind: FileKind::Directory, len: 0, id: (0, 0) };
        if key.is_root() {
            return Ok(directory);
        }
        let error = match wait(self.0.store.head(&key)) {
            Ok(found) => {
                return Ok(Metadata { kind: FileKind::File, len: found.size, id: (0, version(&found)) });
            }
            Err(error) => error,
        };
        if !matches!(error, object_store::Error::NotFound { .. }) {
            return Err(failed(error));
        }
        let inside = wait(self.0.store.list_with_delimiter(Some(&key))).map_err(failed)?;
        let is_empty = inside.objects.is_empty() && inside.common_prefixes.is_empty();
        if is_empty { Err(failed(error)) } else { Ok(directory) }
    }

    fn link_metadata(&self, path: &Path) -> io::Result<Metadata> {
        self.metadata(path)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        let key = key(dir)?;
        let inside = wait(self.0.store.list_with_delimiter(Some(&key))).map_err(failed)?;
        let objects = inside.objects.iter().map(|object| &object.location);
        let names = objects.chain(&inside.common_prefixes).filter_map(Key::filename);
        Ok(names.map(OsString::from).collect())
    }

    fn create_directory(&self, _: &Path) -> io::Result<()> {
        Ok(())
    }

    fn sync_directory(&self, _: &Path) -> io::Result<()> {
        Ok(())
    }

    fn rename(&self, _: &Path, _: &Path) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::Unsupported, StoreFault::NoRenames))
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        let key = key(path)?;
        let upload = self.uploads().remove(&key);
        match upload {
            Some(upload) => {
                upload.abort();
                Ok(())
            }
            None => wait(self.0.store.delete(&key)).map_err(failed),
        }
    }

    fn remove_directory(&self, dir: &Path) -> io::Result<()> {
        let key = key(dir)?;
        let doomed: Vec<Key> =
            self.uploads().keys().filter(|other| other.prefix_matches(&key)).cloned().collect();
        for key in doomed {
            let upload = self.uploads().remove(&key);
            if let Some(upload) = upload {
                upload.abort();
            }
        }
        Ok(())
    }

    fn free_bytes(&self, _: &Path) -> io::Result<u64> {
        Ok(u64::MAX)
    }
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
