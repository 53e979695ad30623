//! What this crate asks of a file system: one small trait, behind which are the disk, object stores, and a failing
//! one for tests.
//!
//! Nothing else here calls `std::fs`. [`disk::Disk`] is the real one. The trait knows positions, lengths,
//! names and durability and nothing else: no cursors, no buffering, no recursion, no temporary names. Those
//! are built on it once, in `file_io`, for every implementation alike.
//!
//! Writes become durable by [`OpenFile::sync`], names by [`FileSystem::sync_directory`]; whatever was not
//! made durable may be lost or kept by a crash, in any order.

pub(crate) mod disk;
#[cfg(feature = "object-store")]
pub(crate) mod object;
pub(crate) mod url;

#[cfg(test)]
mod conformance;
#[cfg(test)]
pub(crate) mod faulty;

use std::{ffi::OsString, fmt, io, path::Path};

/// Operations on names.
pub(crate) trait FileSystem: fmt::Debug + Send + Sync {
    /// Whether names can be changed, and files seen while they are written. Where not, a file appears under its name
    /// when it is synced, and that is all that there is to publish it. One created as new is then refused if it is
    /// there and its length was not set before: this is how of several writers the first is found. Others may replace
    /// what is there.
    fn renames(&self) -> bool;

    /// Opens a file. It never waits: a pipe or device is opened as it is, or refused.
    fn open(&self, path: &Path, access: Access) -> io::Result<Box<dyn OpenFile>>;

    /// What a path leads to, through symbolic links.
    fn metadata(&self, path: &Path) -> io::Result<Metadata>;

    /// What a name is itself: a symbolic link is neither a file nor a directory.
    fn link_metadata(&self, path: &Path) -> io::Result<Metadata>;

    /// The names in a directory, in any order.
    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>>;

    /// Creates a directory; its parent must exist.
    fn create_directory(&self, dir: &Path) -> io::Result<()>;

    /// Makes the names in a directory durable.
    fn sync_directory(&self, dir: &Path) -> io::Result<()>;

    /// Gives a file or directory another name in one step; a file that has that name is replaced.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file.
    fn remove_file(&self, path: &Path) -> io::Result<()>;

    /// Removes an empty directory.
    fn remove_directory(&self, dir: &Path) -> io::Result<()>;

    /// Bytes that this process may still write to the disk of a directory.
    fn free_bytes(&self, dir: &Path) -> io::Result<u64>;
}

/// Operations on an open file. All are positioned, so threads share one. What a kind of file does not have is provided,
/// and refused.
pub(crate) trait OpenFile: fmt::Debug + Send + Sync {
    /// Reads up to `out.len()` bytes; 0 only at the end of the file or for an empty `out`.
    fn read_at(&self, _out: &mut [u8], _offset: u64) -> io::Result<usize> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    /// Writes a part of `bytes`, at least one byte of those that there are.
    fn write_at(&self, _bytes: &[u8], _offset: u64) -> io::Result<usize> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    /// Extends the file by zeros to `len` bytes, and takes the disk space for them, so that writing them can not fail
    /// for lack of it. False where the file system can not do that: then only the length is set.
    fn allocate(&self, len: u64) -> io::Result<bool> {
        self.set_len(len).map(|()| true)
    }

    /// Cuts the file or extends it by zeros.
    fn set_len(&self, _len: u64) -> io::Result<()> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    /// What the file is now.
    fn metadata(&self) -> io::Result<Metadata>;

    /// Makes content and length durable, not the name.
    fn sync(&self) -> io::Result<()>;

    /// Locks the file against other openings of it until it is closed, also by a crash. False if another
    /// holds the lock; an error of the kind `Unsupported` if the file system has no locks.
    fn try_lock(&self) -> io::Result<bool> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// For reading.
    Read,
    /// For writing; it must exist, and keeps its content.
    Write,
    /// For writing; it is created if it is not there, and else keeps its content.
    CreateOrWrite,
    /// For writing; it must not exist.
    CreateNew,
}

/// What a name leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Metadata {
    pub(crate) kind: FileKind,
    pub(crate) len: u64,
    /// Device and number of the file: equal for equal files. Of an object, 0 and what tells its version.
    pub(crate) id: (u64, u64),
}

/// What kind of thing a name leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileKind {
    File,
    Directory,
    /// Something else, in words.
    Other(&'static str),
}
