//! Writes objects: an object appears as a whole when its file is synced, and not before.
//!
//! A file that is at most one part long, or whose length was not set, is uploaded in one request; others in
//! [`parts`](super::parts).

use std::{
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use object_store::{Error, ObjectStore, ObjectStoreExt, PutMode, PutOptions, path::Path as Key};

use super::{
    ObjectFiles,
    fault::failed,
    parts::{Limits, Parts},
    runtime::wait,
};
use crate::files::{FileKind, Metadata, OpenFile};

/// An object that is being written.
#[derive(Debug)]
pub(super) struct Upload {
    store: Arc<dyn ObjectStore>,
    key: Key,
    /// Whether the object must not exist yet.
    is_new: bool,
    limits: Limits,
    body: Mutex<Body>,
}

#[derive(Debug)]
enum Body {
    /// The bytes for one request, and whether their length was set.
    Whole(Vec<u8>, bool),
    Parts(Parts),
    /// The object is complete and has this many bytes.
    Done(u64),
}

impl Upload {
    pub(super) fn new(store: Arc<dyn ObjectStore>, key: Key, is_new: bool, limits: Limits) -> Upload {
        Upload { store, key, is_new, limits, body: Mutex::new(Body::Whole(Vec::new(), false)) }
    }

    fn body(&self) -> MutexGuard<'_, Body> {
        self.body.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut body = self.body();
        match &mut *body {
            Body::Whole(bytes, _) if bytes.is_empty() && len > self.limits.part_bytes => {
                let upload = wait(self.store.put_multipart(&self.key)).map_err(failed)?;
                *body = Body::Parts(Parts::new(len, self.limits, upload));
                Ok(())
            }
            Body::Whole(bytes, is_told) => {
                bytes.resize(len as usize, 0);
                *is_told = true;
                Ok(())
            }
            Body::Parts(parts) if parts.len() == len => Ok(()),
            Body::Parts(_) | Body::Done(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        match &mut *self.body() {
            Body::Whole(whole, _) => {
                let (start, end) = (offset as usize, offset as usize + bytes.len());
                whole.resize(whole.len().max(end), 0);
                whole[start..end].copy_from_slice(bytes);
                Ok(bytes.len())
            }
            Body::Parts(parts) => parts.write_at(bytes, offset),
            Body::Done(_) => Err(io::ErrorKind::PermissionDenied.into()),
        }
    }

    fn len(&self) -> u64 {
        match &*self.body() {
            Body::Whole(bytes, _) => bytes.len() as u64,
            Body::Parts(parts) => parts.len(),
            Body::Done(len) => *len,
        }
    }

    /// Uploads the remaining bytes and completes the object.
    fn finish(&self) -> io::Result<()> {
        let mut body = self.body();
        let len = match &mut *body {
            Body::Whole(bytes, is_told) => {
                // A file whose length was set has a unique name. For other files, the name decides which writer is
                // first.
                let mode = if self.is_new && !*is_told { PutMode::Create } else { PutMode::Overwrite };
                let options = PutOptions { mode, ..PutOptions::default() };
                wait(self.store.put_opts(&self.key, bytes.clone().into(), options)).map_err(failed)?;
                bytes.len() as u64
            }
            Body::Parts(parts) => {
                if let Err(error) = parts.finish() {
                    // The upload may have succeeded and only the response been lost: no other writer uploads parts
                    // under this name.
                    match wait(self.store.head(&self.key)) {
                        Ok(there) if there.size == parts.len() => {}
                        Ok(_) | Err(Error::NotFound { .. }) => return Err(error),
                        Err(unknown) => return Err(failed(unknown)),
                    }
                }
                parts.len()
            }
            Body::Done(_) => return Ok(()),
        };
        *body = Body::Done(len);
        Ok(())
    }

    /// Aborts the upload.
    pub(super) fn abort(&self) {
        if let Body::Parts(parts) = std::mem::replace(&mut *self.body(), Body::Done(0)) {
            parts.abort();
        }
    }
}

/// A handle to an object that is being written.
#[derive(Debug)]
pub(super) struct UploadFile {
    pub(super) files: ObjectFiles,
    pub(super) key: Key,
    pub(super) upload: Arc<Upload>,
}

impl OpenFile for UploadFile {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        self.upload.write_at(bytes, offset)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.upload.set_len(len)
    }

    fn metadata(&self) -> io::Result<Metadata> {
        Ok(Metadata { kind: FileKind::File, len: self.upload.len(), id: (0, 0) })
    }

    fn sync(&self) -> io::Result<()> {
        self.upload.finish()?;
        self.files.forget(&self.key);
        Ok(())
    }
}
