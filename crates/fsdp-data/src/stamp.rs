//! Detects changes of a file without reading it.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A file's metadata in the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    device: u64,
    inode: u64,
    len_bytes: u64,
    /// Seconds and nanoseconds of the last write, and of the last change of any kind.
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    /// Returns the stamp of the file at a path.
    ///
    /// # Errors
    /// Errors of the file system.
    pub(super) fn of(path: &Path) -> io::Result<Stamp> {
        let metadata = path.metadata()?;
        Ok(Stamp {
            device: metadata.dev(),
            inode: metadata.ino(),
            len_bytes: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }
}
