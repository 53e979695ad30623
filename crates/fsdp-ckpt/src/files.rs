//! The file system interface of this crate: one small trait, implemented by the disk, by object stores, and by a
//! failing file system for tests.
//!
//! No other module of this crate calls `std::fs`; [`disk::Disk`] does. The trait covers only positions, lengths, names
//! and durability: no cursors, buffering, recursion or temporary names. `file_io` builds these on top, once for all
//! implementations.
//!
//! [`OpenFile::sync`] makes writes durable, [`FileSystem::sync_directory`] names. After a crash, any change that was
//! not made durable may be lost or kept, in any order.

pub(crate) mod disk;
pub(crate) mod hurry;
#[cfg(feature = "object-store")]
pub(crate) mod object;
pub(crate) mod url;

#[cfg(test)]
mod conformance;
#[cfg(test)]
pub(crate) mod testing;

use std::{ffi::OsString, fmt, io, path::Path};

/// Operations on names.
pub(crate) trait FileSystem: fmt::Debug + Send + Sync {
    /// Whether files can be renamed, and are visible while they are written. If not, a file appears under its name when
    /// it is synced, which is the only way to publish it. Syncing a file opened with [`Access::CreateNew`] then fails
    /// if the name exists, unless the file's length was set before; this decides which of several writers is first. Any
    /// other file may replace an existing one.
    fn renames(&self) -> bool;

    /// Opens a file. Never blocks: a pipe or device is opened as it is, or refused.
    fn open(&self, path: &Path, access: Access) -> io::Result<Box<dyn OpenFile>>;

    /// The metadata of the file or directory at a path; follows symbolic links.
    fn metadata(&self, path: &Path) -> io::Result<Metadata>;

    /// The metadata of the name itself: a symbolic link is neither a file nor a directory.
    fn link_metadata(&self, path: &Path) -> io::Result<Metadata>;

    /// The names in a directory, in any order.
    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>>;

    /// Creates a directory; its parent must exist.
    fn create_directory(&self, dir: &Path) -> io::Result<()>;

    /// Makes the names in a directory durable.
    fn sync_directory(&self, dir: &Path) -> io::Result<()>;

    /// Renames a file or directory atomically; replaces a file that has the new name.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file.
    fn remove_file(&self, path: &Path) -> io::Result<()>;

    /// Removes an empty directory.
    fn remove_directory(&self, dir: &Path) -> io::Result<()>;

    /// Bytes that this process can still write to the disk of a directory.
    fn free_bytes(&self, dir: &Path) -> io::Result<u64>;
}

/// Operations on an open file. All are positioned, so threads can share a file. The default methods fail, for kinds of
/// files that lack the operation.
pub(crate) trait OpenFile: fmt::Debug + Send + Sync {
    /// Reads up to `out.len()` bytes. Returns 0 only at the end of the file or for an empty `out`.
    fn read_at(&self, _out: &mut [u8], _offset: u64) -> io::Result<usize> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    /// Writes the first bytes of `bytes`, at least one unless it is empty, and returns their number.
    fn write_at(&self, _bytes: &[u8], _offset: u64) -> io::Result<usize> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    /// Extends the file with zeros to `len` bytes and reserves disk space for them, so that writing them cannot fail
    /// for lack of space. Returns false if the file system cannot reserve space; then only the length is set.
    fn allocate(&self, len: u64) -> io::Result<bool> {
        self.set_len(len).map(|()| true)
    }

    /// Truncates the file or extends it with zeros.
    fn set_len(&self, _len: u64) -> io::Result<()> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    /// The current metadata of the file.
    fn metadata(&self) -> io::Result<Metadata>;

    /// Makes contents and length durable, but not the name.
    fn sync(&self) -> io::Result<()>;

    /// Locks the file against other handles until it is closed, which a crash also does. Returns false if another
    /// handle holds the lock. Fails with `Unsupported` if the file system has no locks.
    fn try_lock(&self) -> io::Result<bool> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// For reading.
    Read,
    /// For writing. The file must exist; its contents are kept.
    Write,
    /// For writing. The file is created if it does not exist; otherwise its contents are kept.
    CreateOrWrite,
    /// For writing. The file must not exist.
    CreateNew,
}

/// The metadata of a file or directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Metadata {
    pub(crate) kind: FileKind,
    pub(crate) len: u64,
    /// Device and inode number, which identify a file. For an object: 0 and a hash of its version.
    pub(crate) id: (u64, u64),
}

/// The type of a directory entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileKind {
    File,
    Directory,
    /// Anything else, described in words.
    Other(&'static str),
}
