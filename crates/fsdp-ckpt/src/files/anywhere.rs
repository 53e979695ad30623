//! Every file that a user can name: those of the disk, and those of object stores by their URLs.

use std::{ffi::OsString, io, path::Path};

use super::{Access, FileSystem, Metadata, OpenFile, disk::Disk, url};

/// The disk, or the object store of a URL.
#[derive(Debug)]
pub(crate) struct Anywhere;

impl Anywhere {
    /// Calls the file system that a path belongs to.
    fn at<T>(path: &Path, call: impl FnOnce(&dyn FileSystem) -> io::Result<T>) -> io::Result<T> {
        if !url::is_url(path) {
            return call(&Disk);
        }
        #[cfg(feature = "object-store")]
        return call(&*super::object::at(path)?);
        #[cfg(not(feature = "object-store"))]
        Err(io::Error::new(io::ErrorKind::Unsupported, url::UrlFault::NotBuilt))
    }
}

impl FileSystem for Anywhere {
    fn renames(&self, path: &Path) -> bool {
        !url::is_url(path)
    }

    fn open(&self, path: &Path, access: Access) -> io::Result<Box<dyn OpenFile>> {
        Self::at(path, |files| files.open(path, access))
    }

    fn metadata(&self, path: &Path) -> io::Result<Metadata> {
        Self::at(path, |files| files.metadata(path))
    }

    fn link_metadata(&self, path: &Path) -> io::Result<Metadata> {
        Self::at(path, |files| files.link_metadata(path))
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        Self::at(dir, |files| files.list(dir))
    }

    fn create_directory(&self, dir: &Path) -> io::Result<()> {
        Self::at(dir, |files| files.create_directory(dir))
    }

    fn sync_directory(&self, dir: &Path) -> io::Result<()> {
        Self::at(dir, |files| files.sync_directory(dir))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        Self::at(from, |files| files.rename(from, to))
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        Self::at(path, |files| files.remove_file(path))
    }

    fn remove_directory(&self, dir: &Path) -> io::Result<()> {
        Self::at(dir, |files| files.remove_directory(dir))
    }

    fn free_bytes(&self, dir: &Path) -> io::Result<u64> {
        Self::at(dir, |files| files.free_bytes(dir))
    }
}
